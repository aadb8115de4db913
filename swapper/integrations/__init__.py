"""Replaces parts of other programs with swapper. Each module names the program; none is imported unless requested."""

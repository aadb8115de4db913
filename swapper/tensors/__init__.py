"""Guarded tensors, torch's functions by what they do, and every private name of torch that swapper uses."""

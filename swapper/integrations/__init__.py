"""swapper in the place of parts of other programs. Each module names the program; none is imported unless asked for."""

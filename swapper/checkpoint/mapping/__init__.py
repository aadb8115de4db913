"""Files of the user's mapped into memory, the tensors that show them, and functions that would overwrite them."""

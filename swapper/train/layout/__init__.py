"""Lists the tensors of a model and its optimizer, places them, and fills sections."""

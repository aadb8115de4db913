"""AioHandle: tensors to files and back in DeepNVMe's shape, with a future for each operation."""

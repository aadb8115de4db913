"""AioHandle: moves tensors to files and back with DeepNVMe's surface, and a future for each operation."""

"""Moves tensors to files and back: AioHandle with DeepNVMe's surface, and GdsHandle and GdsFile over NVIDIA's cuFile (GPUDirect
Storage), past host memory if possible. Each operation is a future."""

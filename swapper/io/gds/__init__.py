"""Moves device memory to files and back with NVIDIA's cuFile (GPUDirect Storage), past host memory if possible."""

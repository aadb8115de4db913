"""GPUDirect Storage: device memory to files and back by NVIDIA's cuFile, past host memory where the machine has it."""

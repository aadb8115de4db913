"""swapper pages PyTorch tensors between memory and NVMe. This file holds the public names and nothing else."""

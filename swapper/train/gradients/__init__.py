"""Keeps gradients: in host memory, owned by autograd, or on NVMe."""

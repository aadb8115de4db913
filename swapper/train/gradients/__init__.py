"""Gradients: in host memory, where autograd made them, or on NVMe."""

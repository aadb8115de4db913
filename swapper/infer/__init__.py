"""Inference with weights that stay on NVMe: a model's parameters are read in place from the user's own checkpoint files."""

"""Defines the optimizer that `offload` returns, applies the user's own, and presents its state as torch does."""

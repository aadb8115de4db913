"""Arithmetic on an accelerator in one pass, one module a concept: in plain torch, which defines the result, and in `triton/`."""

"""Passes through a model in training: hooks, gathers, operations on cold parameters, micro-batches together."""

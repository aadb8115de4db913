"""Holds and updates the parameters, gradients and optimizer state of a model in training on an accelerator."""

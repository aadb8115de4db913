"""What a model in training has on an accelerator: parameters, gradients, state, and updates there."""

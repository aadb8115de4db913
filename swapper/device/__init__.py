"""What runs on an accelerator: arithmetic over slices of state, gradients, quantised weights and pages, each in one pass.

One file a concept, with the arithmetic in plain torch, which is what it means, and how many bytes it has to move; the same
as a Triton kernel is in `kernels/`, under the same name.
"""

"""The kernels in Triton, bit-equal to the plain torch.

These modules import Triton: only `swapper.device.kernels.compiler.kernel` imports them.
"""

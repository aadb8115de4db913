"""The arithmetic of swapper.device in Triton. Imports Triton: only `swapper.device.compiler.kernel` imports these."""

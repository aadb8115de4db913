"""The accelerator: `device` (streams, events, memory; the only module that knows torch's device modules), storage, tier, uploads,
downloads; and `kernels/`, arithmetic over slices of state and quantized weights.
"""

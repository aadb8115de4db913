"""What is on an accelerator: arithmetic over slices of state, gradients, quantised weights and pages; and the device tier.

The arithmetic is one file a concept, in plain torch, which is what it means, with how many bytes it has to move; the same as a
Triton kernel is in `kernels/`, under the same name. The tier is `device` (streams, events, memory: the only place that knows
torch's modules), `storage`, `layout`, `uploads`, `downloads`, `host_side` and `tier`: docs/decisions/device-tier.md.
"""

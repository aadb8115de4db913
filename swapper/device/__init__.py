"""One accelerator: device, storage, tier, copies, registered memory, placement; `kernels/`: arithmetic on state and weights."""

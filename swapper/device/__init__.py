"""One accelerator: device, storage, tier, copies, registered memory, placement; and its arithmetic on state and weights."""

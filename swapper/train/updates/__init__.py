"""Updates parameters, slice by slice: on the CPU, or on an accelerator."""

"""Leases the parameters of a model in training, group by group, for where kernels use them: host memory or a device."""

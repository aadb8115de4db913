"""What training and inference both need to know of a model's modules: groups, the guard on cold parameters, outputs."""

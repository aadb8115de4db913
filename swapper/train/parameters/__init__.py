"""Parameters of a model in training: leased around forward and backward, cold otherwise."""

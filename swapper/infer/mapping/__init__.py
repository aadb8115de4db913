"""Which tensor of a checkpoint each parameter of a model gets, and how a model comes to its memory."""

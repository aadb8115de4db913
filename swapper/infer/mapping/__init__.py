"""Maps tensors of a checkpoint to parameters of a model, and gives a model its memory."""

"""Reads and writes the format of torch.save: a stored zip with a pickle that names storages. Containers use it."""

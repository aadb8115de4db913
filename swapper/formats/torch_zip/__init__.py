"""The format of torch.save: a stored zip with a pickle that names storages. Containers and snapshots are of it."""

"""Reads and writes file formats as pure data: the location of each tensor of a checkpoint. Readers trust and run nothing."""

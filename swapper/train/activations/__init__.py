"""Moves saved activations out of memory between forward and backward."""

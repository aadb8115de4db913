"""Saved activations away from memory between forward and backward."""

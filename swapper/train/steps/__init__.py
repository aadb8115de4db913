"""Decides when a step updates which groups, runs these updates, and undoes those that fail."""

"""Keeps the optimizer state and shows it as the user's optimizer does."""

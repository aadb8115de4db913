"""Keeps the keys and values of attention in pages, and in files."""

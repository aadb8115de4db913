"""Stores of pages: swap files, scratch files, and external files that are only read."""

"""Faults from outside of swapper: each gets a clear error, nothing hangs, nothing leaks."""

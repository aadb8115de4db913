"""Forecasts steps and passes: what they move, how long they take, and what would be faster, before they run."""

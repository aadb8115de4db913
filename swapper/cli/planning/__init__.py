"""Holds the parts of `swapper plan`: units, models without weights, forecasts of a step, searches over them, pictures."""

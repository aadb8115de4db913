"""What `swapper plan` consists of: units, models without weights, forecasts of a step, searches over them, pictures."""

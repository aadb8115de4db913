"""Real models, trained for real: the swapped run beside plain torch, bit for bit."""

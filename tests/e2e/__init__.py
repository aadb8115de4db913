"""Real models, trained for real: the swapped run against plain torch, bit for bit."""

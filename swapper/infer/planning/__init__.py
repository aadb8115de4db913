"""Pure planning of inference: what streams, what stays, and how budgets are divided."""

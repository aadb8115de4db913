"""The optimizer that `offload` returns, the user's own behind it, and its state as torch shows it."""

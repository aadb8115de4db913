"""Updates parameters: in `step()`, in the next forward, or during backward."""

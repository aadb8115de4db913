"""When and how parameters are updated: in `step()`, in the next forward, or during backward."""

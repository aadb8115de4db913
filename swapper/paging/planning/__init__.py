"""Pure planning: tensors to sections to pages, the budget, the order of accesses, what stays and how far ahead is read."""

"""Pure planning: tensors to sections to pages, the budget, the order of accesses, the resident set, the prefetch distance."""

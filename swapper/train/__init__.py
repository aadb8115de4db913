"""Training under the pager: groups, hooks on modules, gradients, and the optimizer's sweep."""

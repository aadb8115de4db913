"""A loaded model at run time: resources, groups, hooks."""

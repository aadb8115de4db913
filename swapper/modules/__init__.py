"""Parts that training and inference share: units and groups, cold parameters, hooks, turns, resources, a model's device."""

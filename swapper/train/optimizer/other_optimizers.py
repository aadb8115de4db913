"""Steps of optimizers that know nothing of the manager, on parameters that it has.

Such a step would change parameters past the manager, keep its own state outside of the budget, and be in no commit. So the first
one is refused: that of an optimizer that was never given to `manager.offload` (a Trainer's default), of a second one beside it, and
of the user's own, whose place another one has taken.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from swapper.errors import StateError
from swapper.runtime.process import is_off
from swapper.train.optimizer.optim import NoOptimizer, PagedOptimizer

SAY = "`model, optimizer = manager.offload(model, optimizer)`"


class OtherOptimizers:
    """Refuses their steps, until `remove`.

    Args:
        optimizer: the user's, which was given to `offload`.
        names: of the model's parameters, by id.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self._optimizer = optimizer
        self._names = names
        me = weakref.ref(self)  # torch's hooks keep alive what they refer to

        def before_step(stepping: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if (alive := me()) is not None:
                alive._check(stepping, has_closure=len(args) > 1 or kwargs.get("closure") is not None)

        self._handle = None if is_off("optimizers") else register_optimizer_step_pre_hook(before_step)

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _check(self, stepping: Optimizer, has_closure: bool) -> None:
        if stepping is self._optimizer:
            raise StateError(
                f"this optimizer's state was taken over by manager.offload: step the one that it returned, {SAY}"
            )
        if _is_ours(stepping) or stepping.param_groups is self._optimizer.param_groups:
            return
        for group in stepping.param_groups:
            for parameter in group["params"]:
                name = self._names.get(id(parameter))
                # Without a gradient it would be left as it is; but a closure is yet to make some.
                if name is not None and (parameter.grad is not None or (has_closure and parameter.requires_grad)):
                    raise StateError(self._refusal(type(stepping).__name__, name))

    def _refusal(self, kind: str, name: str) -> str:
        if isinstance(self._optimizer, NoOptimizer):
            remedy = (
                f"manager.offload was given a model only, to be used and not trained. Give it the optimizer too, {SAY}"
            )
        else:
            remedy = (
                "manager.offload was given another optimizer. Have one for all that is trained, with param_groups, and step the "
                f"one that is returned, {SAY}"
            )
        return (
            f"{kind}.step() would change parameter {name} past the manager, which has it: nothing of that would be paged or "
            f"committed. {remedy}; a Trainer takes both, Trainer(model, optimizers=(optimizer, scheduler))"
        )


def _is_ours(stepping: Optimizer) -> bool:
    """Whether it is the one that `offload` returned, or one that wraps that (accelerate's, Lookahead)."""
    return isinstance(stepping, PagedOptimizer) or any(
        isinstance(value, PagedOptimizer) for value in vars(stepping).values()
    )

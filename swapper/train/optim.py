"""PagedOptimizer: the optimizer that `SwapManager.offload` returns, a drop-in for the user's own.

It has the original's `param_groups`, the very same objects, so that learning-rate schedulers made before or after act on
both; its `step` is the sweep over the paged state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from swapper.errors import UnsupportedError
from swapper.interrupts import held_back


class PagedOptimizer(Optimizer):
    """An optimizer whose state lives where the manager placed it.

    Args:
        original: the user's optimizer. Its settings and param_groups are shared.
        run_step: does the update.
        save_state: returns the state in torch's form, {index of parameter: {key: tensor}}.
        load_state: takes the same.
        state: shows the state of each parameter.
    """

    def __init__(
        self,
        original: Optimizer,
        run_step: Callable[[], None],
        save_state: Callable[[], dict[int, dict[str, Any]]],
        load_state: Callable[[dict[int, dict[str, Any]]], None],
        state: Mapping[torch.Tensor, Any],
    ) -> None:
        super().__init__([{"params": list(group["params"])} for group in original.param_groups], original.defaults)
        self.param_groups = original.param_groups
        self._original = original
        self._run_step = run_step
        self._save_state = save_state
        self._load_state = load_state
        self.state = state  # type: ignore[assignment]
        for name in [name for name in vars(self) if name.endswith("_hooks")]:  # those that the user has put in go on
            setattr(self, name, getattr(original, name))

    def __repr__(self) -> str:
        return f"Paged{self._original!r}"

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Ctrl-C takes effect when the update is whole; a second Ctrl-C at once. A step that fails half-way is undone where the
        one before is committed, and can be taken again; where it is not, the manager can then only be closed.

        Raises:
            IoError: a transfer failed.
            StateError: the manager is closed, has failed, or is used in a forked child.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with held_back:
            self._run_step()
        self._original._opt_called = True  # type: ignore[attr-defined]  # a scheduler made before asks for it
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state_dict, its tensors mapped from the swap files: without memory, to be read until the next step.

        torch.save writes them as plain tensors; copy.deepcopy makes plain ones that last. See train/mapped_state.py.

        Raises:
            IoError: what is changed in memory could not be written.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        with held_back:
            state = self._save_state()
        state_dict: dict[str, Any] = {"state": state, "param_groups": packed_groups(self.param_groups)}
        for after in self._optimizer_state_dict_post_hooks.values():
            state_dict = after(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state_dict of plain torch's optimizer, or of this one.

        Raises:
            ValueError: its groups, parameters or state differ from this optimizer's. Nothing has changed then.
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        theirs, ours = state_dict["param_groups"], self.param_groups
        lengths = [(len(a["params"]), len(b["params"])) for a, b in zip(theirs, ours, strict=False)]
        if len(theirs) != len(ours) or any(a != b for a, b in lengths):
            raise ValueError(
                "the state_dict's parameter groups differ from this optimizer's: "
                f"{[len(g['params']) for g in theirs]} parameters against {[len(g['params']) for g in ours]}"
            )
        with held_back:
            self._load_state(state_dict["state"])
            for saved, group in zip(theirs, ours, strict=True):
                group.update({key: value for key, value in saved.items() if key != "params"})
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the optimizer is paged: add groups to the original before manager.offload."""
        if hasattr(self, "_original"):
            raise UnsupportedError(
                "add_param_group after offload is not supported yet: add the group, with requires_grad, before manager.offload, "
                "and freeze its parameters until they shall be trained"
            )
        super().add_param_group(param_group)


class NoOptimizer(Optimizer):
    """Stands in where nothing is trained."""

    def __init__(self) -> None:
        super().__init__([{"params": []}], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def packed_groups(param_groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `param_groups` as torch's state_dict has them: parameters by number, in order of appearance."""
    packed = []
    start = 0
    for group in param_groups:
        count = len(group["params"])
        settings = {key: value for key, value in group.items() if key != "params"}
        packed.append({**settings, "params": list(range(start, start + count))})
        start += count
    return packed

"""Checks that a step, taken slice by slice, gives plain torch's results: gradients, settings, and the stepping
optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from swapper.errors import StateError, UnsupportedError
from swapper.runtime.process import is_off
from swapper.train.layout.inventory import Inventory, updated_dtype
from swapper.train.layout.slices import ParameterLocations
from swapper.train.optimizer.entries import StateEntries
from swapper.train.optimizer.membership import Membership
from swapper.train.optimizer.optim import NoOptimizer, PagedOptimizer
from swapper.train.optimizer.optimizer_probe import StateForm
from swapper.train.updates.sweep import NO_GROUP, Trainable


class Conditions:
    """Checks gradients and settings before a step begins.

    Args:
        inventory: the contents of the model and the optimizer.
        trainables: the trained parameters.
        membership: updates their `settings` to the optimizer's groups.
        entries: the optimizer's state of each parameter.
    """

    def __init__(
        self, inventory: Inventory, trainables: Sequence[Trainable], membership: Membership, entries: StateEntries
    ) -> None:
        self._inventory = inventory
        self._trainables = trainables
        self._membership = membership
        self._entries = entries
        self._edits = membership.edits
        self._look_at_groups()

    def _look_at_groups(self) -> None:
        """Collect the kinds of parameters, by group."""
        # For each kind the forms for which its parameters have space, each with the name of one of them.
        self._kinds: dict[tuple[int, torch.dtype, int], dict[StateForm, str]] = {}
        self._of_kind: dict[tuple[int, torch.dtype], list[tuple[nn.Parameter, ParameterLocations]]] = {}
        for trainable in self._trainables:
            for parameter, places, settings in zip(
                trainable.parameters, trainable.places, trainable.settings, strict=True
            ):
                if settings == NO_GROUP:
                    continue
                dtype = updated_dtype(parameter, self._inventory.master_dtype)
                room = self._kinds.setdefault((settings, dtype, parameter.dim()), {})
                room.setdefault(self._inventory.forms[places.name], places.name)
                self._of_kind.setdefault((settings, dtype), []).append((parameter, places))
        self._starts_together = {
            (s, dtype) for (s, dtype, _), forms in self._kinds.items() if any(form.starts_together for form in forms)
        }

    def check_step(self) -> None:
        """Raise StateError if the optimizer would treat a slice differently from all parameters together.

        Its settings were changed so that it would keep other state, or need whole parameters; or a parameter has its
        first gradient later than others and must not.
        """
        self.check_settings()
        for kind in self._starts_together:
            active = [places.name for parameter, places in self._of_kind[kind] if parameter.grad is not None]
            new = [name for name in active if not self._entries[name]]
            if new and len(new) < len(active):
                raise StateError(
                    f"parameter {new[0]} has its first gradient later than others, and with these settings the optimizer rounds "
                    "differently in such a step: build it with foreach=False"
                )

    def check_settings(self) -> None:
        """Do the part of `check_step` that needs no gradients."""
        self._membership.follow()
        if self._edits != self._membership.edits:
            self._look_at_groups()
            self._edits = self._membership.edits
        for (settings, dtype, ndim), forms in self._kinds.items():
            now = self._inventory.discovery.form(settings, dtype, ndim)
            for form, name in forms.items():
                if now is not form and (set(now.keys) - set(form.keys) or (form.may_cut and not now.may_cut)):
                    raise StateError(
                        f"parameter {name} is in the optimizer's group {settings}, which keeps other state than there is space for "
                        f"({sorted(key.name for key in now.keys)} instead of {sorted(key.name for key in form.keys)}) or may not "
                        "update parameters in pieces: the group's settings were changed, or the parameter was in another group. "
                        "Do that before manager.offload"
                    )

    @property
    def all_gradients_matter(self) -> bool:
        """Return True if no parameter may be updated before it is known which ones have a gradient in this step."""
        return any(
            not self._entries[places.name] for kind in self._starts_together for _, places in self._of_kind[kind]
        )


def check_update(update: str, model: nn.Module, forms: Iterable[StateForm], optimizer: str) -> None:
    """Raise UnsupportedError if updates at this time cannot be exact.

    Args:
        update: "step", "deferred" or "backward".
        model: to be offloaded.
        forms: of its optimizer's state.
        optimizer: its kind, for people.
    """
    names = sorted({name for form in forms for name in form.sets})
    if update == "deferred" and names:
        raise UnsupportedError(
            f"{optimizer} changes its own settings ({', '.join(names)}) in a step, which update='deferred' would show only when "
            "after the next forward: offload with update='step'"
        )
    if update == "backward" and any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise UnsupportedError(
            "DistributedDataParallel averages gradients over processes during backward, and update='backward' would use "
            "them before that: offload with update='step' or update='deferred'"
        )


SAY = "`model, optimizer = manager.offload(model, optimizer)`"


class OtherOptimizers:
    """Refuses, until `remove`, steps of other optimizers on the manager's parameters.

    Such a step would change parameters past the manager, keep its own state outside of the budget, and be in no commit.
    It may be a step of an optimizer that was never given to `manager.offload` (a Trainer's default), of a second one,
    or of the user's own, whose state another one has taken over.

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
                # Without a gradient it would leave the parameter unchanged; but a closure may still make some.
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
    """Return True if it is the one that `offload` returned, or a wrapper of that (accelerate's, Lookahead)."""
    return isinstance(stepping, PagedOptimizer) or any(
        isinstance(value, PagedOptimizer) for value in vars(stepping).values()
    )

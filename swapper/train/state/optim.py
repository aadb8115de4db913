"""Defines PagedOptimizer, the drop-in for the user's own optimizer that `SwapManager.offload` returns.

It has the original's `param_groups`, the very same objects, so that learning-rate schedulers made before or after act
on both; its `step` is the sweep over the paged state. Steps of other optimizers on its parameters are refused.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from swapper.errors import StateError, UnsupportedError
from swapper.runtime.interrupts import defer_signals
from swapper.runtime.process import is_off
from swapper.train.optimizer.optimizer_set import MODES, is_own_method
from swapper.train.state.state_view import StateView


class StateOwner(Protocol):
    """Owns the optimizer's state."""

    @property
    def view(self) -> StateView:
        """Shows the state of each parameter."""

    @property
    def hidden(self) -> str | None:
        """What a method of the user's class, which reads gradients and state, would not see; None: nothing."""

    def save(self) -> dict[int, dict[str, Any]]:
        """Return the state in torch's form, {index of parameter: {key: tensor}}."""

    def load(self, state: dict[int, dict[str, Any]]) -> None:
        """Load the same."""

    def find_frozen(self, state: dict[int, dict[str, Any]]) -> dict[nn.Parameter, dict[str, Any]]:
        """Return the state that there is no space for: of parameters that were frozen at `offload`, by parameter."""

    def begin_frozen(self, state: Mapping[nn.Parameter, Mapping[str, object]]) -> None:
        """Have the user's optimizer keep it, so that the layout to come has space for it."""

    def skip_step(self, parameters: Iterable[torch.Tensor]) -> None:
        """Begin the state of `parameters`, which have gradients, in a step that torch.amp.GradScaler skips."""


class PagedOptimizer(Optimizer):
    """An optimizer whose state lives where the manager placed it. Made by `SwapManager.offload`.

    Args:
        original: the user's optimizer. Its settings and param_groups are shared.
        run_step: does the update.
        note_skipped: called when torch.amp.GradScaler skips a step; None: with one optimizer nobody needs to know.
        train_more: called with a function that adds a group to the original; calls it, and trains the group.
    """

    _owner: StateOwner | None = None

    def __init__(
        self,
        original: Optimizer,
        run_step: Callable[[], None],
        train_more: Callable[[Callable[[], None]], None],
        note_skipped: Callable[[], None] | None = None,
    ) -> None:
        super().__init__([{"params": list(group["params"])} for group in original.param_groups], original.defaults)
        del self.defaults  # the original's attributes are used: see `__setattr__`
        self._original = original
        self._run_step = run_step
        self._note_skipped = note_skipped
        self._unscaled: list[tuple[weakref.ref[torch.Tensor], int]] = []  # by a step that failed, with their versions
        self._train_more = train_more
        for name in [name for name in vars(self) if name.endswith("_hooks")]:  # the user's hooks still run
            setattr(self, name, getattr(original, name))

    def bind(self, owner: StateOwner | None) -> None:
        """Set the owner of the state; None: there is none now, and none is kept alive."""
        self._owner = owner

    @property
    def state(self) -> Any:
        """See train/state/state_view.py."""
        return vars(self)["state"] if self._owner is None else self._owner.view

    @state.setter
    def state(self, state: Mapping[torch.Tensor, Mapping[str, object]]) -> None:
        if self._owner is None:
            vars(self)["state"] = state
        elif state is not self._owner.view:
            self._owner.view.replace(state)

    def __getattr__(self, name: str) -> Any:
        if "_original" in vars(self) and is_own_method(type(self._original), name):
            return partial(self._call, name)
        return getattr(self._original_with(name), name)

    def __setattr__(self, name: str, value: object) -> None:
        """Set attributes of the user's optimizer (`defaults`, an option of its class) on that."""
        if name not in vars(self) and not hasattr(type(self), name) and self._is_shared(name):
            setattr(self._original, name, value)
        else:
            super().__setattr__(name, value)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the user's class: `train()` or `eval()` of MODES, which set each parameter from its state, or another.

        It changes parameters by operations of its own, which find their pages, and reads and writes copies of the state.

        Raises:
            UnsupportedError: it would see parameters for their fp32 masters, or no gradients, as a backward uses them up.
            StateError: parameters with gradients have no state yet.
        """
        if name not in MODES and (why := self._bound.hidden) is not None:
            raise UnsupportedError(f"{type(self._original).__name__}.{name}() cannot be called: {why}")
        if name not in MODES and any(
            p.grad is not None and p not in self.state for g in self.param_groups for p in g["params"]
        ):
            raise StateError(
                f"{type(self._original).__name__}.{name}() would begin the state of parameters, which only a step does here: call "
                "it after the first step"
            )
        caller = object.__new__(type(self._original))
        caller.__dict__.update(vars(self._original), state=self.state)
        result = getattr(caller, name)(*args, **kwargs)
        vars(self._original).update({k: value for k, value in vars(caller).items() if k not in ("state", "step")})
        return result

    def _original_with(self, name: str) -> Optimizer:
        if not self._is_shared(name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self._original

    def _is_shared(self, name: str) -> bool:
        """Return True for an option of the original. Not for torch's marks of its own `step`."""
        return not name.startswith("_") and name in vars(vars(self).get("_original", self))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True if torch.amp.GradScaler calls `step` with gradients still scaled, and also to have it skipped.

        torch's fused optimizers have this mark; a skipped step begins their state. Each of several has it here, as a
        training step is over when all have stepped, or have been skipped.
        """
        return self._note_skipped is not None or self._begins_when_skipped

    @property
    def _begins_when_skipped(self) -> bool:
        return getattr(self._original, "_step_supports_amp_scaling", False)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The original's: edit it as in plain torch, see train/state/conditions.py."""
        return self._original.param_groups if hasattr(self, "_original") else vars(self)["param_groups"]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if hasattr(self, "_original"):
            self._original.param_groups = groups
        else:
            vars(self)["param_groups"] = groups

    @property
    def _bound(self) -> StateOwner:
        if self._owner is None:
            raise StateError("the optimizer has no state: the manager failed, and can only be closed")
        return self._owner

    def __repr__(self) -> str:
        return f"Paged{self._original!r}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "an offloaded optimizer cannot be copied or pickled (torch.save, copy.deepcopy), because its state lies in the "
            "manager's files: save or copy optimizer.state_dict(), or keep everything with manager.snapshot(path)"
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Ctrl-C takes effect when the update is complete; a second Ctrl-C at once. A step that fails half-way is undone
        if the step before is committed, and can be taken again; if not, the manager can then only be closed.

        Raises:
            IoError: a transfer failed.
            StateError: the manager is closed, has failed, or is used in a forked child.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            with torch.no_grad(), defer_signals:
                if self._follow_scaler():
                    self._run_step()
                else:
                    self._skip_step()
        except BaseException:
            self._forget_scaler()
            raise
        self._unscaled = []
        self._original._opt_called = True  # type: ignore[attr-defined]  # an existing scheduler checks it
        return loss

    def _forget_scaler(self) -> None:
        """Remove what a GradScaler removes only after a step that ends: the next call may not be its own."""
        for name in ("grad_scale", "found_inf"):
            vars(self).pop(name, None)

    def _skip_step(self) -> None:
        if self._begins_when_skipped:
            self._bound.skip_step(p for group in self.param_groups for p in group["params"] if p.grad is not None)
        if self._note_skipped is not None:
            self._note_skipped()

    def _follow_scaler(self) -> bool:
        """Unscale the gradients if torch.amp.GradScaler leaves that to `step`. Return False if it has found an infinite one.

        The scaler sets these attributes around its call of `step`: `found_inf`, and `grad_scale`, which is None if the user
        has unscaled the gradients. Torch's fused kernels unscale in fp32 as they update; here gradients are unscaled in
        their own dtype first, which for fp16 would lose what the scale is for.

        Raises:
            UnsupportedError: gradients in fp16 are to be unscaled.
        """
        found_inf: torch.Tensor | None = vars(self).get("found_inf")
        scale: torch.Tensor | None = vars(self).get("grad_scale")
        if found_inf is None:
            return True
        if found_inf.item():
            return False
        if scale is not None and not self._is_unscaled():
            if any(
                p.grad is not None and p.grad.dtype == torch.float16 for g in self.param_groups for p in g["params"]
            ):
                raise UnsupportedError(
                    "a GradScaler and a fused optimizer of fp16 parameters: their gradients would be unscaled in fp16 and lose "
                    "what is small. Keep the model in fp32 and use torch.autocast, or train it in bf16 without a scaler"
                )
            inverse = scale.double().reciprocal().float()
            torch.amp.GradScaler(scale.device.type)._unscale_grads_(self, inverse, torch.zeros_like(found_inf), False)
            self._unscaled = [(weakref.ref(gradient), gradient._version) for gradient in self._gradients()]
        return True

    def _is_unscaled(self) -> bool:
        """Return whether the gradients are as a step that failed left them, unscaled, which the scaler does not know."""
        if not self._unscaled or len(self._unscaled) != len(gradients := self._gradients()):
            return False
        pairs = zip(self._unscaled, gradients, strict=True)
        return all(of() is gradient and version == gradient._version for (of, version), gradient in pairs)

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state_dict; its tensors are mapped from the swap files, without memory, until the next step.

        torch.save writes them as plain tensors; copy.deepcopy makes plain ones that last. See
        train/state/mapped_state.py.

        Raises:
            IoError: changes in memory could not be written.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        with defer_signals:
            state = self._bound.save()
        state_dict: dict[str, Any] = {"state": state, "param_groups": packed_groups(self.param_groups)}
        for after in self._optimizer_state_dict_post_hooks.values():
            state_dict = after(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of plain torch's optimizer, or of this one.

        State of parameters that were frozen at `offload` needs space: the run gets a new layout, as in `add_param_group`.

        Raises:
            ValueError: its groups, parameters or state differ from this optimizer's. Nothing has changed then.
            BudgetError, DirectoryError, StateError: see `add_param_group`.
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
        numbers = {key: number for number, key in enumerate(key for group in theirs for key in group["params"])}
        unknown = state_dict["state"].keys() - numbers.keys()
        if unknown:
            raise ValueError(f"the state_dict has state for {min(unknown, key=str)!r}, which is in none of its groups")
        with defer_signals:
            state = {numbers[key]: state for key, state in state_dict["state"].items()}
            frozen = self._bound.find_frozen(state)
            if frozen:
                self._train_more(partial(self._bound.begin_frozen, frozen))
            self._bound.load(state)
            self._replace_settings(copy.deepcopy(theirs))
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _replace_settings(self, saved: list[dict[str, Any]]) -> None:
        """Give the groups the saved settings and no others, as torch does; the class adds those that an older version lacks."""
        for group, settings in zip(self.param_groups, saved, strict=True):
            for key in group.keys() - settings.keys() - {"params", "param_names"}:
                del group[key]
        restore_settings(self.param_groups, saved)
        self._original.__setstate__({"param_groups": self.param_groups})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more of the offloaded model's parameters, as torch's method does. If it fails, nothing has changed.

        The run gets a new layout, with space for the gradients and the state: it is copied once, to new swap files.

        Raises:
            BudgetError: the budget is too small for it; names the smallest that works.
            DirectoryError: the drive has no space for new swap files in addition to the old.
            UnsupportedError: the group has parameters that are not of the offloaded model.
            StateError: in the middle of a forward, a backward or a gather.
            ValueError, TypeError: torch refuses the group.
        """
        if not hasattr(self, "_original"):
            super().add_param_group(param_group)
            return
        with defer_signals:
            self._train_more(lambda: self._original.add_param_group(param_group))


class NoOptimizer(Optimizer):
    """Stands in if nothing is trained."""

    def __init__(self) -> None:
        super().__init__([{"params": []}], {})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        pass


SAY = "`model, optimizer = manager.offload(model, optimizer)`"


class OtherOptimizers:
    """Refuses, until `remove`, steps of other optimizers on the manager's parameters.

    Such a step would change parameters past the manager, keep its own state outside of the budget, and be in no commit.
    It may be a step of an optimizer that was never given to `manager.offload` (a Trainer's default), of a second one,
    or of the user's own, whose state another one has taken over.

    Args:
        names: of the model's parameters, by id.
    """

    def __init__(self, optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> None:
        self._optimizers = optimizers
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
        if any(stepping is own for own in self._optimizers):
            raise StateError(f"this optimizer was taken over by manager.offload: step the one that it returned, {SAY}")
        if _is_ours(stepping) or any(stepping.param_groups is own.param_groups for own in self._optimizers):
            return
        for group in stepping.param_groups:
            for parameter in group["params"]:
                name = self._names.get(id(parameter))
                # Without a gradient it would leave the parameter unchanged; but a closure may still make some.
                if name is not None and (parameter.grad is not None or (has_closure and parameter.requires_grad)):
                    raise StateError(self._refusal(type(stepping).__name__, name))

    def _refusal(self, kind: str, name: str) -> str:
        if isinstance(self._optimizers[0], NoOptimizer):
            remedy = f"manager.offload was given a model only, not to be trained. Give it the optimizer too, {SAY}"
        else:
            remedy = (
                "manager.offload was given another optimizer. Give it all that train the model, offload(model, [one, other]), and "
                f"step those that are returned, {SAY}"
            )
        return (
            f"{kind}.step() would change parameter {name} past the manager, which has it: nothing of that would be paged or "
            f"committed. {remedy}; a Trainer takes both, Trainer(model, optimizers=(optimizer, scheduler))"
        )


def _is_ours(stepping: Optimizer) -> bool:
    """Return True if `offload` returned it, or for a wrapper of such (accelerate's, Lookahead, a container of several)."""
    return isinstance(stepping, PagedOptimizer) or any(
        isinstance(held, PagedOptimizer)
        for value in vars(stepping).values()
        for held in (value if isinstance(value, list | tuple) else (value,))
    )


def restore_settings(param_groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Give groups the settings of as many saved ones, of `packed_groups` or of a state_dict. Raises ValueError: there are not."""
    for group, settings in zip(param_groups, saved, strict=True):
        group.update({key: value for key, value in settings.items() if key != "params"})


def packed_groups(param_groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `param_groups` as in torch's state_dict: parameters by number, in order of appearance."""
    packed = []
    start = 0
    for group in param_groups:
        members = group.get("params")
        count = len(members) if isinstance(members, list | tuple) else 0  # anything else is refused at the step
        settings = {key: value for key, value in group.items() if key != "params"}
        packed.append({**settings, "params": list(range(start, start + count))})
        start += count
    return packed

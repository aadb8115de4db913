"""Answers accesses to cold parameters of a model in training: faults them in, shows them, or refuses with a remedy."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import nn

from swapper.errors import BudgetError, ColdParameterError, StateError
from swapper.modules.cold import ASSIGNED_BESIDE_ALIAS, is_cold
from swapper.modules.guarded import FaultHandler, RunWith
from swapper.modules.module_hooks import outside_transforms
from swapper.paging.pager import Pager
from swapper.tensors.guarded_tensor import KEEPS_NOTHING, Function
from swapper.tensors.torch_private import storage_of
from swapper.train.groups.parameter_group import GroupParameters
from swapper.train.groups.session_guard import SessionGuard
from swapper.train.layout.inventory import Inventory
from swapper.train.layout.slices import TensorLocation, Trainable
from swapper.train.passes.gathering import Gathering
from swapper.train.passes.train_hooks import TrainingHooks
from swapper.train.state.mapped_state import MappedState, expire

log = logging.getLogger("swapper")


class ModelInUse(Protocol):
    """Forwards, backwards and steps of a model, as far as accesses ask for them. OffloadedModel answers."""

    gathering: Gathering
    hooks: TrainingHooks

    def finish_update(self) -> None:
        """Finish the last step, if deferred updates of it are left."""

    def settle_update(self) -> None:
        """The same, and wait until its results are in host memory."""


class FaultOwner(Protocol):
    @property
    def in_use(self) -> ModelInUse: ...


class ParameterFaultHandler(FaultHandler):
    """Faults in the parameters of one model in training.

    Args:
        groups: all groups, by index; they may be added later.
        owner: the model.
        changes_itself: forwards change parameters, as far as the model tells.

    Attributes:
        changes_itself: the same, as observed so far.
        shown: parameters that a state_dict shows.
    """

    advice = (
        "Look at it inside `with manager.gather(module_or_parameters):` (write=True to change it); deepcopy() works there "
        "too. model.state_dict() and load_state_dict() work anywhere; manager.snapshot(path) keeps the whole state in a file "
        "that plain torch.load reads. .to(), .half() and the like cannot be applied after offload: apply them before."
    )

    def __init__(
        self,
        inventory: Inventory,
        trainables: Sequence[Trainable],
        groups: Sequence[GroupParameters],
        places: Mapping[tuple[str, str], TensorLocation],
        pager: Pager,
        session_guard: SessionGuard,
        owner: FaultOwner,
        changes_itself: bool,
    ) -> None:
        self._groups = groups
        self._session_guard = session_guard
        self._owner = owner
        self.changes_itself = changes_itself
        self._is_trained = bool(trainables)
        self._warned: set[str] = set()
        self._names = inventory.names
        self._group_of = {name: group.index for group in inventory.groups for name, _ in group.parameters}
        self._mastered = {of.name for trainable in trainables for of in trainable.places if of.has_master}
        self.shown = ShownParameters(places, self._group_of, pager)

    def fault_in(self, parameter: nn.Parameter) -> bool:
        with outside_transforms():
            self._session_guard.events.check_usable()
            self.catch_up(parameter)
        return not is_cold(parameter) or self._owner.in_use.hooks.fault_in(parameter)

    @property
    def answers(self) -> bool:
        return self._session_guard.operates

    def read(self, parameters: Sequence[nn.Parameter], function: Function, run: RunWith) -> Any:
        """Gather the parameters for one operation; if they do not fit, show the swap file, mapped."""
        self._warn_of_use(
            "read", "%s reads parameter %s, which is away: it is brought in for that, and so is each one that is read outside of a "
            "forward. Several operations on it are faster inside `with manager.gather(module_or_parameters):`",
            function, parameters,
        )  # fmt: skip
        self._update_before()
        with ExitStack() as gathered:
            try:
                gathered.enter_context(self._owner.in_use.gathering.gather(parameters, write=False))
            except BudgetError as error:
                return run(self._show(parameters, function, error))
            return self._owner.in_use.hooks.follow(parameters, lambda: run({}))

    def _show(
        self, parameters: Sequence[nn.Parameter], function: Function, error: BudgetError
    ) -> dict[int, torch.Tensor]:
        """Return mapped tensors that show the parameters, by id."""
        needs_graph = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters)
        on_device = any(parameter.device.type != "cpu" for parameter in parameters)
        if on_device or (needs_graph and function not in KEEPS_NOTHING):
            nbytes = sum(parameter.nbytes for parameter in parameters)
            raise BudgetError(
                f"{getattr(function, '__name__', function)} needs {len(parameters)} parameters at once, {nbytes} bytes, and there "
                f"is no room for them: do it one by one, {'' if on_device else 'or under torch.no_grad(), '}or raise the budget "
                f"({error})",
                missing_bytes=error.missing_bytes,
            ) from error
        return {id(parameter): self.shown.show(self._names[id(parameter)]) for parameter in parameters}

    def write(self, parameters: Sequence[nn.Parameter], function: Function, run: RunWith) -> Any:
        how = (
            "%s changes parameter %s, which is away: it is brought in for that and written back, and so is each one that is "
            "changed outside of a forward. Several operations on it are faster inside "
            "`with manager.gather(module_or_parameters, write=True):`"
        )
        if not self._is_trained:
            how += (
                ". There is no optimizer whose steps would commit such changes: a run that is killed resumes from before them, one "
                "that is closed has them, and manager.snapshot(path) keeps them in a file"
            )
        self._warn_of_use("write", how, function, parameters)
        self._update_before()
        with self._session_guard.turns.turn(), outside_transforms():
            self._session_guard.events.check_to_write()
        with self._owner.in_use.gathering.gather(parameters, write=True):
            return run({})

    def _update_before(self) -> None:
        """Finish the last step's updates before an operation outside of forwards; meanwhile no thread uses the model."""
        with self._session_guard.turns.turn(), outside_transforms():
            self._owner.in_use.finish_update()

    def warn_of_alias(self, name: str) -> None:
        self._warn_once(
            "alias",
            "gather: a tensor or graph of yours still refers to memory of the device that has %s, and is given up when others "
            "need it: an operation on it can end the process, or find old values. Keep a copy (.clone())",
            name,
        )

    def _warn_of_use(self, what: str, how: str, function: Function, parameters: Sequence[nn.Parameter]) -> None:
        self._warn_once(what, how, getattr(function, "__name__", function), self._names[id(parameters[0])])

    def _warn_once(self, what: str, text: str, *names: object) -> None:
        if what not in self._warned:
            self._warned.add(what)
            log.warning(text, *names)

    def catch_up(self, parameter: nn.Parameter) -> None:
        group = self._groups[self._group_of[self._names[id(parameter)]]]
        if group.catch_up is not None and not group.paged:
            group.catch_up(None)

    def detached(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """For state_dict: show the parameter by the mapped swap file, or fault it in within a forward."""
        if self._owner.in_use.gathering.is_closed or self.fault_in(parameter):
            return None
        self._update_before()
        for group in self._groups:
            group.home.sync_to_host()
        return self.shown.show(self._names[id(parameter)])

    def check_assignable(self, parameter: nn.Parameter) -> None:
        name = self._names[id(parameter)]
        if name in self._groups[self._group_of[name]].aliased():
            raise ColdParameterError(f"parameter {name} {ASSIGNED_BESIDE_ALIAS}")

    def owns(self, tensor: torch.Tensor) -> bool:
        storage = storage_of(tensor)
        return any(storage in group.own_storages for group in self._groups)

    def note_change(self, group: GroupParameters, names: list[str]) -> None:
        """Note that a module's forward has changed its own parameters.

        From now on each step is committed before the next forward begins.

        Raises:
            StateError: one has an fp32 master, which cannot be updated in the middle of a pass.
        """
        self.changes_itself = True
        self._session_guard.events.changed_in_pass()
        for name in names:
            if name in self._mastered:
                raise StateError(
                    f"parameter {name} was changed in a forward or backward, and its fp32 master would not follow: change it "
                    "inside `with manager.gather(..., write=True)`, or offload with master_weights=None"
                )

    def describe(self, parameter: nn.Parameter) -> str:
        return self._names[id(parameter)]


class ShownParameters:
    """Shows cold parameters in `model.state_dict()` by mapped tensors, which take no memory until they change.

    Each is shown by one tensor, however often it is requested: torch.save writes a tied one once.

    Args:
        group_of: index of the group of each parameter, by name.
    """

    def __init__(
        self, places: Mapping[tuple[str, str], TensorLocation], group_of: Mapping[str, int], pager: Pager
    ) -> None:
        self._places = places
        self._group_of = group_of
        self._pager = pager
        self._groups: dict[int, MappedState] = {}
        self._tensors: weakref.WeakValueDictionary[str, torch.Tensor] = weakref.WeakValueDictionary()
        self._all_written = False

    def show(self, name: str) -> torch.Tensor:
        """Return the mapped tensor of a parameter. Raises IoError: changes in memory could not be written."""
        shown = self._tensors.get(name)
        if shown is not None:
            return shown
        if not self._all_written:
            self._pager.flush()
            self._all_written = True
        group = self._group_of[name]
        if group not in self._groups:
            self._groups[group] = MappedState(self._pager, "state_dict()")
        shown = self._tensors[name] = self._groups[group].tensor(self._places[name, "param"])
        return shown

    def expire(self, why: str, group: int | None = None) -> None:
        """Expire the mapped tensors of `group`, or all, before these parameters change."""
        self._all_written = False
        for index in list(self._groups) if group is None else [group]:
            if index in self._groups:
                expire([self._groups.pop(index)], why)
        for name in [name for name in self._tensors if group in (None, self._group_of[name])]:
            self._tensors.pop(name, None)

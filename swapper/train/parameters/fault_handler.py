"""Who answers for the parameters of a model in training while they are away: they are brought in, shown, or refused with advice."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from swapper.errors import BudgetError, StateError
from swapper.modules.cold import is_cold
from swapper.modules.guarded import Run
from swapper.modules.own_hook import outside_transforms
from swapper.modules.torch_functions import KEEPS_NOTHING, Function
from swapper.paging.pager import Pager
from swapper.train.layout.inventory import Inventory
from swapper.train.layout.slices import TensorLocation
from swapper.train.optimizer.mapped_state import MappedState, expire
from swapper.train.parameters.gathering import Gathering
from swapper.train.parameters.parameter_group import GroupParameters
from swapper.train.session.session_guard import SessionGuard
from swapper.train.updates.sweep import Trainable

log = logging.getLogger("swapper")

Follow = Callable[[Sequence[nn.Parameter], Callable[[], Any]], Any]
"""Does an operation that uses parameters which are there, and has them there when its backward comes."""


class ParameterFaultHandler:
    """What cold parameters ask. See swapper.modules.guarded.FaultHandler.

    Args:
        inventory: what the model consists of.
        trainables: what is trained.
        groups: all groups, by index; they may come later.
        places: where everything lies, by name of a parameter and key.
        pager: what is changed in memory is written by it before it is shown.
        session_guard: where the user comes in.
        gathering: what the user has in memory.
        finish_update: has the updates done that the last step has left.
        changes_itself: whether forwards change parameters.

    Attributes:
        changes_itself: the same, as it has turned out.
        changed_in_pass: told when a forward has changed parameters.
        bring_in: leases a parameter's group for the running forward that contains it; False if there is none.
        follow: see Follow.
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
        gathering: Gathering,
        finish_update: Callable[[], None],
        changes_itself: bool,
    ) -> None:
        self._groups = groups
        self._session_guard = session_guard
        self._gathering = gathering
        self._finish_update = finish_update
        self.changes_itself = changes_itself
        self.changed_in_pass: Callable[[], None] = lambda: None
        self.bring_in: Callable[[nn.Parameter], bool] = lambda parameter: False
        self.follow: Follow = lambda parameters, run: run()
        self._is_trained = bool(trainables)
        self._told: set[str] = set()
        self._names = {id(p): name for group in inventory.groups for name, p in group.parameters}
        self._group_of = {id(p): group.index for group in inventory.groups for _, p in group.parameters}
        self._mastered = {of.name for trainable in trainables for of in trainable.places if of.has_master}
        groups_by_name = {name: group.index for group in inventory.groups for name, _ in group.parameters}
        self.shown = ShownParameters(places, groups_by_name, pager)

    def bring(self, parameter: nn.Parameter) -> bool:
        with outside_transforms():
            self._session_guard.check()
            self.catch_up(parameter)
        return not is_cold(parameter) or self.bring_in(parameter)

    @property
    def answers(self) -> bool:
        return self._session_guard.operates

    def read(self, parameters: Sequence[nn.Parameter], function: Function, run: Run) -> Any:
        """For the time of an operation the parameters are in memory; where they do not all fit there, the swap file is mapped."""
        self._tell(
            "read", "%s reads parameter %s, which is away: it is brought in for that, and so is each one that is read outside of a "
            "forward. Several operations on it are faster inside `with manager.gather(module_or_parameters):`",
            function, parameters,
        )  # fmt: skip
        self._update_before()
        with ExitStack() as gathered:
            try:
                gathered.enter_context(self._gathering.gather(parameters, write=False))
            except BudgetError as error:
                return run(self._show(parameters, function, error))
            return self.follow(parameters, lambda: run({}))

    def _show(
        self, parameters: Sequence[nn.Parameter], function: Function, error: BudgetError
    ) -> dict[int, torch.Tensor]:
        """Return what shows parameters that do not fit into memory together, by id."""
        needs_graph = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters)
        on_device = any(parameter.device.type != "cpu" for parameter in parameters)
        if on_device or (needs_graph and function not in KEEPS_NOTHING):
            nbytes = sum(parameter.nbytes for parameter in parameters)
            raise BudgetError(
                f"{getattr(function, '__name__', function)} needs {len(parameters)} parameters at one time, {nbytes} bytes, and "
                f"there is no room for them: do it one by one, or under torch.no_grad(), or raise the budget ({error})"
            ) from error
        return {id(parameter): self.shown.show(self._names[id(parameter)]) for parameter in parameters}

    def write(self, parameters: Sequence[nn.Parameter], function: Function, run: Run) -> Any:
        """As `manager.gather(parameters, write=True)` for the time of an operation."""
        how = (
            "%s changes parameter %s, which is away: it is brought in for that and written back, and so is each one that is "
            "changed outside of a forward. Several operations on it are faster inside "
            "`with manager.gather(module_or_parameters, write=True):`"
        )
        if not self._is_trained:
            how += (
                ". There is no optimizer whose steps would commit such changes: a run that is killed goes on from before them, one "
                "that is closed has them, and manager.snapshot(path) keeps them in a file"
            )
        self._tell("write", how, function, parameters)
        self._update_before()
        with self._session_guard.turns.turn(), outside_transforms():
            self._session_guard.check_to_write()
        with self._gathering.gather(parameters, write=True):
            return run({})

    def _update_before(self) -> None:
        """An operation outside of forwards comes: no thread is inside the model while updates that are to be done are done."""
        with self._session_guard.turns.turn(), outside_transforms():
            self._finish_update()

    def whole(self, parameter: nn.Parameter) -> None:
        """Views of it are views of its own place."""

    def _tell(self, what: str, how: str, function: Function, parameters: Sequence[nn.Parameter]) -> None:
        if what not in self._told:
            self._told.add(what)
            log.warning(how, getattr(function, "__name__", function), self._names[id(parameters[0])])

    def catch_up(self, parameter: nn.Parameter) -> None:
        """A parameter in memory is cold while its update is still to be done: do it."""
        group = self._groups[self._group_of[id(parameter)]]
        if group.catch_up is not None and not group.paged:
            group.catch_up(None)

    def detached(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """For state_dict: the parameter as the swap file is mapped. Within a forward it is brought in instead."""
        if self._gathering.is_closed or self.bring(parameter):
            return None
        self._update_before()
        return self.shown.show(self._names[id(parameter)])

    def indexed(self, parameter: nn.Parameter, index: Any) -> torch.Tensor | None:
        return None

    def note_change(self, group: GroupParameters, names: list[str]) -> None:
        """A module's forward changed its own parameters. Masters cannot follow in the middle of a pass.

        From now on a step is committed before the next forward begins.
        """
        self.changes_itself = True
        self.changed_in_pass()
        for name in names:
            if name in self._mastered:
                raise StateError(
                    f"parameter {name} was changed in a forward or backward, and its fp32 master would not follow: change it "
                    "inside `with manager.gather(..., write=True)`, or offload with master_weights=None"
                )

    def describe(self, parameter: nn.Parameter) -> str:
        return self._names[id(parameter)]


class ShownParameters:
    """Shows parameters that are away, in `model.state_dict()`, by tensors that take no memory until they change.

    Each is shown by one tensor however often it is asked for: torch.save writes a tied one once.

    Args:
        places: of all parameters, by name and kind.
        group_of: the number of the group of each parameter, by name.
        pager: what is changed in memory is written by it before it is shown.
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
        """Return what shows the parameter of that name.

        Raises:
            IoError: what is changed in memory could not be written.
        """
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
        """Parameters of `group`, or all, are about to change: what was shown of them is not to be looked at any more."""
        self._all_written = False
        for index in list(self._groups) if group is None else [group]:
            if index in self._groups:
                expire([self._groups.pop(index)], why)
        for name in [name for name in self._tensors if group in (None, self._group_of[name])]:
            self._tensors.pop(name, None)

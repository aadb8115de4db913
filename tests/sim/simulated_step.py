"""A training loop around the real executor of updates: groups, sweep and owner are in memory, and fail when they are told to.

The same loop runs in plain torch. Every parameter is compared, bit for bit, when a forward or a backward uses it and after
each step. A fault is raised at one call of the sweep or the owner; what a session does after an error is done here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from swapper.errors import StateError
from swapper.train.groups.group_state import CURRENT, LEGAL_MOVES, GroupState
from swapper.train.layout.slices import GroupUpdate, Trainable
from swapper.train.steps.executor import UpdateExecutor
from swapper.train.steps.policies import POLICIES

GROUPS, MEMBERS, WIDTH = 4, 2, 3


class Fault(Exception):
    """The one that was ordered.

    Attributes:
        is_of_update: a group's update, or what begins the first of a step, has failed.
    """

    is_of_update = False


@contextmanager
def _part_of_update() -> Iterator[None]:
    try:
        yield
    except Fault as fault:
        fault.is_of_update = True
        raise


class Group:
    """A group of one parameter, as the executor sees it."""

    def __init__(self, index: int, parameter: nn.Parameter, moves: set[tuple[GroupState, GroupState]]) -> None:
        self.index = index
        self.parameter = parameter
        self.group = SimpleNamespace(parameters=[(f"p{index}", parameter)])
        self.home = SimpleNamespace(expected_before=lambda: [index - 1] if index else [])
        self.state = CURRENT
        self.catch_up: Callable[[Any], None] | None = None
        self.is_leased = False
        self._moves = moves

    def move(self, new: GroupState) -> None:
        assert (self.state, new) in LEGAL_MOVES
        self._moves.add((self.state, new))
        self.state = new

    def defer_update(self, state: GroupState, catch_up: Callable[[Any], None]) -> None:
        if self.state is not state:
            self.move(state)
        self.catch_up = catch_up

    def clear_deferred(self) -> None:
        self.forget_update()

    def forget_update(self) -> None:
        self.catch_up = None
        if self.state is not CURRENT:
            self.move(CURRENT)

    def written(self) -> list[str]:
        return []


class Sweep:
    """Updates parameters by gradient descent: half of a tensor at a time."""

    def __init__(
        self, trainables: list[Trainable], rates: list[float], ahead: int, may_fail: Callable[[], None]
    ) -> None:
        self.trainables = trainables
        self.rates = rates  # of each optimizer, which the user may change
        self.ahead, self.prepares = ahead, True
        self.members = range(MEMBERS)
        self.before: dict[str, torch.Tensor] = {}  # parameters before their last update
        self._begun: dict[int, float] = {}
        self._may_fail = may_fail

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name in ("take_in_written", "give_back", "show", "settle", "fetch_ahead", "prepare"):
            return lambda *_: self._may_fail()
        if name in ("rejoin", "abandon"):
            return lambda: None
        raise AttributeError(name)

    def groups_of(self, member: int) -> range:
        return range(member, member + 1)

    def begin(self, member: int) -> None:
        with _part_of_update():
            self._may_fail()
        self._begun[member] = self.rates[member]

    def end(self) -> None:
        self._may_fail()
        self._begun.clear()

    def end_of(self, member: int) -> None:
        self._may_fail()
        del self._begun[member]

    def changed_setting(self, member: int) -> str | None:
        return None if self._begun[member] == self.rates[member] else "lr"

    def fix(self, trainable: Trainable, groups: range) -> GroupUpdate | None:
        self._may_fail()
        (parameter,), (settings,) = trainable.parameters, trainable.settings
        if settings not in groups or parameter.grad is None:
            return None
        return GroupUpdate(trainable, (parameter.grad,))

    def fix_all(self, member: int) -> dict[int, GroupUpdate]:
        found = (self.fix(trainable, self.groups_of(member)) for trainable in self.trainables)
        return {update.trainable.group: update for update in found if update is not None}

    @_part_of_update()
    def update(self, update: GroupUpdate) -> None:
        self._may_fail()
        (parameter,), (gradient,), (settings,) = (
            update.trainable.parameters,
            update.gradients,
            update.trainable.settings,
        )
        assert gradient is not None and type(gradient) is torch.Tensor
        self.before[update.names[0]] = parameter.detach().clone()
        with torch.no_grad():
            for part in (slice(0, 1), slice(1, None)):
                parameter.data[part] -= self._begun.get(settings, self.rates[settings]) * gradient[part]
                self._may_fail()


@dataclass
class Layer:
    """A use of a parameter, which `gather` returns in a forward and `reach` in a backward; `reduce` makes its gradient."""

    gather: Callable[[], torch.Tensor]
    reach: Callable[[], torch.Tensor]
    reduce: Callable[[torch.Tensor], torch.Tensor] = lambda gradient: gradient


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, parameter: torch.Tensor, layer: Layer) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(value)
        return value * layer.gather()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (value,), (gradient,) = ctx.saved_tensors, gradients
        return gradient * ctx.layer.reach(), ctx.layer.reduce(gradient * value), None


class SimulatedRun:
    """A loop of one seed.

    Args:
        update: as of `offload`.
        fault_at: the number of the call that fails; None: none does.
        can_undo: the step before is committed.

    Attributes:
        calls: that could have failed.
        moves: that groups have made.
    """

    fails_at_step = False

    def __init__(self, seed: int, update: str, fault_at: int | None = None, can_undo: bool = True) -> None:
        self._random = self._chances = random.Random(seed)
        self._numbers = torch.Generator().manual_seed(seed)
        self.calls = 0
        self.moves: set[tuple[GroupState, GroupState]] = set()
        self._fault_at = fault_at
        self._can_undo = can_undo
        self._policy = POLICIES[update]
        self.plain = [nn.Parameter(self._vector()) for _ in range(GROUPS)]
        ours = [nn.Parameter(self._own(parameter).detach().clone()) for parameter in self.plain]
        self.groups = [Group(index, parameter, self.moves) for index, parameter in enumerate(ours)]
        trainables: list[Any] = [
            Trainable(index, [p], [SimpleNamespace(name=f"p{index}")], [index % MEMBERS])
            for index, p in enumerate(ours)
        ]
        self.sweep: Any = Sweep(trainables, [0.1, 0.2], self._random.randrange(2), self._may_fail)
        groups: Any = self.groups
        self.executor = UpdateExecutor(self._policy, self.sweep, groups, self)
        self.executor.watch(ours)
        self.failure: BaseException | None = None
        self._task = -1  # of the last backward
        self._calls: list[Any] = []  # of the last forward, whose backward is not over

    def _may_fail(self) -> None:
        self.calls += 1
        if self.calls == self._fault_at:
            raise Fault

    # --- what a rank of several has otherwise ---------------------------------------------------------------------------

    def _own(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return what of a parameter is this run's."""
        return parameter

    def _gather(self, group: Group) -> torch.Tensor:
        """Return a group's whole parameter."""
        return group.parameter.detach().clone()

    def _reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of what is this run's, given that of the whole parameter."""
        return gradient

    def _vector(self) -> torch.Tensor:
        return torch.randn(WIDTH, generator=self._numbers)

    # --- the owner ----------------------------------------------------------------------------------------------------

    def undo_update(self, updates: Collection[GroupUpdate], error: BaseException) -> bool:
        if updates and not self._can_undo:
            self.failure = error
            return False
        self._restore(name for update in updates for name in update.names)
        return True

    def _restore(self, names: Iterator[str]) -> None:
        for name in names:
            if (before := self.sweep.before.pop(name, None)) is not None:
                self.groups[int(name[1:])].parameter.data.copy_(before)

    def check_usable(self) -> None:
        if self.failure is not None:
            raise StateError("the run cannot go on")

    def may_defer(self, member: int) -> bool:
        self._may_fail()
        return self._chances.random() < 0.8

    def begin_early(self) -> bool:
        self._may_fail()
        self.sweep.before.clear()
        return self._chances.random() < 0.8

    def have_arrived(self, trainable: Trainable) -> bool:
        return self._chances.random() < 0.5

    def is_aliased(self, trainable: Trainable) -> bool:
        return self._chances.random() < 0.2

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self, steps: int) -> bool:
        """Return False if the run could not go on after the fault."""
        for _ in range(steps):
            self.sweep.rates[:] = [self._random.choice([0.1, 0.3]) for _ in range(MEMBERS)]
            batches = [self._vector() for _ in range(self._random.choice([1, 1, 2]))]
            uses = [(index, False) for index in range(GROUPS) if self._random.random() < 0.9]
            uses.insert(0, (self._random.randrange(GROUPS), self._random.random() < 0.5))  # one more, perhaps detached
            if not self._again(lambda batches=batches, uses=uses: self._passes(batches, uses)):
                return False
            members = self._random.sample(range(MEMBERS), MEMBERS)
            if not self._again(lambda members=members: self._step(members)):
                return False
            if self._random.random() < 0.3 and not self._again(self._read):
                return False
        return self._again(self._read)

    def _again(self, part: Callable[[], None]) -> bool:
        """Run a part of the loop, a second time if it fails. Return False if it cannot be."""
        with suppress(Fault):
            part()
            return True
        if self.failure is None:
            part()
        return self.failure is None

    def _read(self) -> None:
        self.executor.finish()
        for group in self.groups:
            self._use(group)

    def _use(self, group: Group) -> torch.Tensor:
        if group.catch_up is not None:
            group.catch_up(None)
        assert group.state is CURRENT
        assert torch.equal(group.parameter, self._own(self.plain[group.index])), f"p{group.index} is of another step"
        return group.parameter

    def _passes(self, batches: list[torch.Tensor], uses: list[tuple[int, bool]]) -> None:
        self.executor.pass_begins()
        for parameter in (*self.plain, *(group.parameter for group in self.groups)):
            parameter.grad = None
        for batch in batches[:-1]:
            with self.executor.accumulating():
                self._pass(batch, uses)
        self._pass(batches[-1], uses)

    def _pass(self, batch: torch.Tensor, uses: list[tuple[int, bool]]) -> None:
        self.executor.pass_begins()
        self.check_usable()
        value = plain = batch.clone().requires_grad_()
        self._calls = []
        for number, (index, is_detached) in enumerate(uses):
            group, call = self.groups[index], SimpleNamespace(module=number, groups=[index], use=-1)
            self.executor.forward_reaches([index])
            self._use(group)
            self.executor.uses.called(call, True)
            ours, theirs = group.parameter, self.plain[index]
            if is_detached:
                ours, theirs = ours.detach(), theirs.detach()
            reach = partial(self._reach, group, call)
            value = _Layer.apply(value, ours, Layer(partial(self._gather, group), reach, self._reduce))
            plain = _Layer.apply(plain, theirs, Layer(lambda p=theirs: p, lambda index=index: self.plain[index]))
            self._calls.append(call)
        plain.sum().backward()
        value.sum().backward()

    def _reach(self, group: Group, call: Any) -> torch.Tensor:
        """A backward comes to a group's layer: those after it are over."""
        task = torch._C._current_graph_task_id()
        self._end_calls(after=call)
        if task != self._task:
            self._task = task
            self.executor.backward_begins(task)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_backward(task))
        self.executor.backward_goes_on()
        self._use(group)
        return self._gather(group)

    def _end_calls(self, after: Any = None) -> None:
        while self._calls and self._calls[-1] is not after:
            self.executor.uses.end(self._calls.pop())

    def _end_backward(self, task: int) -> None:
        self._end_calls()
        self.executor.backward_goes_on()
        self.executor.backward_ends(task)

    def _step(self, members: list[int]) -> None:
        """Take the step of each optimizer, and undo it as a session does if it fails."""
        try:
            self._take(members)
        except Fault:
            if self.failure is None and not self._can_undo:
                self.failure = Fault()
            self._restore(iter(list(self.sweep.before)))
            self.executor.forget()
            raise
        with torch.no_grad():
            for index, parameter in enumerate(self.plain):
                if parameter.grad is not None:
                    for part in (slice(0, 1), slice(1, None)):
                        parameter.data[part] -= self.sweep.rates[index % MEMBERS] * parameter.grad[part]

    def _take(self, members: list[int]) -> None:
        if not self.executor.has_begun_early:
            self.executor.finish(in_order=True)
            self.sweep.before.clear()
        for number, member in enumerate(members):
            self.executor.take_step(member, is_last=number == MEMBERS - 1)

"""Parameters that somebody has in memory for the time of a context, outside of the order of a step: `manager.gather`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import nn

from swapper.errors import StateError
from swapper.modules.own_hook import outside_transforms
from swapper.modules.turns import Turns
from swapper.runtime.interrupts import close_all, defer_sigint, run_uninterrupted
from swapper.train.parameters.parameter_group import GroupParameters


class Gathering:
    """Owns what is gathered now.

    Args:
        groups: all groups, by index; they may come later.
        refresh_masters: called with groups whose parameters may have been changed.
        turns: threads take them.
        check_room: given pages that are to be in memory at one time; raises BudgetError where there is no room.

    Attributes:
        is_closed: the manager is.
    """

    def __init__(
        self,
        groups: Sequence[GroupParameters],
        refresh_masters: Callable[[Iterable[GroupParameters]], None],
        turns: Turns,
        check_room: Callable[[Iterable[int]], None],
    ) -> None:
        self._check_room = check_room
        self._turns = turns
        self._groups = groups
        self._refresh_masters = refresh_masters
        self._open = 0
        self.is_closed = False

    @property
    def is_open(self) -> bool:
        return self._open > 0

    @contextmanager
    def gather(self, parameters: Iterable[nn.Parameter], write: bool) -> Iterator[None]:
        """Lease the groups of `parameters` for the time of the context."""
        wanted = {id(parameter) for parameter in parameters}
        groups = [g for g in self._groups if any(id(p) in wanted for p in g.parameters)]
        unknown = wanted - {id(p) for group in groups for p in group.parameters}
        if unknown:
            raise StateError("gather was given parameters that are not of the offloaded model")
        leased: list[GroupParameters] = []
        versions = {id(p): p._version for group in groups for p in group.parameters}
        names: list[str] = []  # of parameters that were changed though nobody had said so
        self._open += 1
        try:
            with self._turns.turn(), outside_transforms(), defer_sigint:
                self._check_room({index for group in groups for index in group.pages_to_hold})
                for group in groups:
                    group.hold(write)
                    leased.append(group)
            yield
        finally:
            run_uninterrupted(lambda: names.extend(self._end(leased, versions, write)))
        if names:
            raise StateError(
                f"parameter {names[0]} was changed inside gather(write=False), and the change may be lost: "
                "say gather(..., write=True)"
            )

    def _end(self, leased: list[GroupParameters], versions: dict[int, int], write: bool) -> list[str]:
        """Let go of what was gathered. Returns the names of the parameters that were changed though nobody had said so."""
        with self._turns.turn(), outside_transforms():
            return self._let_go_of(leased, versions, write)

    def _let_go_of(self, leased: list[GroupParameters], versions: dict[int, int], write: bool) -> list[str]:
        self._open -= 1
        names: list[str] = []
        if self.is_closed:
            return names  # `close` has let go of them
        try:
            close_all(partial(_let_go, group, versions, write, names) for group in leased)
        finally:
            if write:
                self._refresh_masters(leased)
        return names

    def close(self) -> None:
        """Let go of what is gathered, as leaving the contexts would: the manager closes inside of them."""
        for group in self._groups:
            for access in list(group.holds):
                write = bool(access.writes)
                group.let_go(write)
                if write:
                    self._refresh_masters([group])
        self.is_closed = True


def _let_go(group: GroupParameters, versions: dict[int, int], write: bool, names: list[str]) -> None:
    """Adds to `names` those of its parameters that were changed though nobody had said so."""
    try:
        seen = [n for n, p in group.group.parameters if p._version != versions[id(p)]]
        unannounced = [] if write else [*seen, *group.written()]
        if unannounced:  # memory and file shall not differ
            group.hold(write=True)
            group.let_go(write=True)
    finally:
        group.let_go(write)
    names += unannounced

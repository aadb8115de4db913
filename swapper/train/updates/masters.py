"""Makes fp32 masters follow parameters that are changed from outside: by `manager.gather`, `load_state_dict`, operations.

A master that is stored encoded is the difference from its parameter, so the parameter is noted before it may change: 2
bytes for each element that is gathered for writing, in addition to the budget, until the change is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import torch

from swapper.paging.pager import Pager
from swapper.train.groups.parameter_group import GroupParameters
from swapper.train.layout.content import copy_of
from swapper.train.layout.trainable import Trainable
from swapper.train.updates.sweep import Sweep


class Masters:
    """Notes parameters before changes, and refreshes their masters afterwards.

    Args:
        fail: called with an error that left some masters as they were: the session cannot go on.
    """

    def __init__(self, sweep: Sweep, pager: Pager, fail: Callable[[BaseException], None]) -> None:
        self._sweep = sweep
        self._pager = pager
        self._fail = fail
        self._of = {t.group: t for t in sweep.trainables if any(places.has_master for places in t.places)}
        self._changes: Counter[int] = Counter()  # that are open, by group
        self._before: dict[int, dict[str, torch.Tensor]] = {}  # by group and name: parameters before a change

    def before_change(self, groups: Iterable[GroupParameters]) -> None:
        """Parameters of `groups`, which are in memory, may be changed until `after_change`."""
        found = list(groups)
        for group in found:
            group.home.sync_to_host()
        for trainable in self._among(found):
            if self._changes[trainable.group] == 0:
                coded = [places for places in trainable.places if places.has_coded_master]
                self._before[trainable.group] = {one.name: copy_of(one.param, self._pager).view(-1) for one in coded}
            self._changes[trainable.group] += 1

    def after_change(self, groups: Iterable[GroupParameters]) -> None:
        """Set masters of `groups` to changed parameters, when the outermost change of each is over: no step is taken before."""
        for trainable in self._among(groups):
            self._changes[trainable.group] -= 1
            if self._changes[trainable.group] == 0:
                try:
                    self._sweep.refresh_masters(trainable, self._before.pop(trainable.group))
                except BaseException as error:
                    self._fail(error)
                    raise

    def _among(self, groups: Iterable[GroupParameters]) -> Iterator[Trainable]:
        found = (self._of.get(group.index) for group in groups)
        return (trainable for trainable in found if trainable is not None)

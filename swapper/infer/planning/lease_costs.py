"""Measures what paging takes of the processors in a loaded model: its modules' hooks, and the leases of their groups, count too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import nn

from swapper.infer.infer_hooks import InferenceHooks
from swapper.infer.matching import Recipe
from swapper.infer.weights import GroupWeights, PagedWeight
from swapper.modules.groups import Unit
from swapper.modules.guarded import FaultHandler
from swapper.modules.home import HostHome
from swapper.modules.operations import cold_seconds
from swapper.modules.paging_costs import Act, measure_paging_costs
from swapper.paging.pager import Pager
from swapper.paging.schedule import Access
from swapper.paging.section import Page, Section
from swapper.paging.virtual_drive import PagingCosts

RESIDENT_TRIALS = 8
"""Of a use of weights that stay: the median counts."""


def measure_lease_costs(page_bytes: int, makes: bool) -> PagingCosts:
    """Measure pages as a loaded model uses them, in memory: a second or so.

    Args:
        page_bytes: of a page.
        makes: weights are computed from what is stored at each use. What that computing takes is not in it.
    """
    return measure_paging_costs(page_bytes, False, writes=False, users=partial(_HookedModules, makes))


def measure_resident_lease(makes: bool) -> float:
    """Return the seconds that each use of a module takes whose weights all stay in memory: of its hooks, and of a lease if weights
    are computed at each use. What that computing takes is not in it."""
    access = Access(None, ())
    modules = _HookedModules(makes, cast(Pager, _NoPages()), None, [access])

    def use() -> None:
        modules(access, lambda: None)

    use()  # weights that are not computed are there from now on
    return cold_seconds(use, RESIDENT_TRIALS)


class _Module(nn.Module):
    """A module of one weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, act: Act) -> None:
        act()


class _NoFaults:
    """A fault handler that is never asked: nobody uses a weight outside of its lease."""


class _NoPages:
    """A pager of weights whose pages have all been leased for good."""

    def written_at(self, access: Access) -> list[tuple[Page, int]]:
        return []


class _HookedModules:
    """A module for each access of a trial, with the hooks of a loaded model. Call it to use one."""

    def __init__(self, makes: bool, pager: Pager, section: Section | None, accesses: Sequence[Access]) -> None:
        made = torch.zeros(1, device="cpu")
        recipe = Recipe((), (lambda parts, empty: made) if makes else None, made.dtype)
        self._handler = cast(FaultHandler, _NoFaults())  # kept here: guards are weak
        self._modules: dict[Access, _Module] = {}
        units, groups = [], []
        for number, access in enumerate(accesses):
            part, pages = torch.zeros(1, device="cpu"), []
            if section is not None:
                pages = [section.pages[index] for index in access.pages]
                part = section.memory[access.pages[0] * (section.page_bytes or 0) :][: made.nbytes].view(made.dtype)
            module = self._modules[access] = _Module(nn.Parameter(torch.zeros(1, device="cpu"), requires_grad=False))
            weight = PagedWeight("weight", module.weight, [part], recipe)
            groups.append(GroupWeights(number, [weight], HostHome(pager, number, pages), self._handler))
            units.append(Unit(str(number), module, (number,)))
        self._hooks = InferenceHooks(units, groups, *[lambda *_: None] * 4)

    def __call__(self, access: Access, act: Act) -> None:
        self._modules[access](act)

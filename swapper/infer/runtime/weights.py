"""A group's parameters at run time: leased together, warm while leased, cold otherwise, and never changed.

Most are views of the window that their run is read into. Those that are used in another dtype than the file has are made from such
a view when they are leased and let go when that ends. What stays in memory for good is leased for good when it was used first; a
group of which everything stays is warm from then on and costs nothing any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import nn

from swapper.errors import StateError
from swapper.infer.mapping.matching import Recipe
from swapper.modules.cold import FaultHandler, guard, leave_cold, materialize, set_cold, unguard
from swapper.paging.pager import Pager
from swapper.paging.planning.schedule import Access
from swapper.paging.section import Page

CPU = torch.device("cpu")
FOR_INFERENCE = "this model was loaded for inference, its weights are read from the checkpoint and never written"


def refuse_gradient() -> NoReturn:
    raise StateError(
        f"a gradient would have to flow back through a model, but {FOR_INFERENCE}: run it within torch.no_grad(), or, to "
        "train, build the model in memory and use swapper.SwapManager"
    )


@dataclass(frozen=True, slots=True)
class PagedWeight:
    """One streamed parameter.

    Attributes:
        name, parameter: of the model.
        parts: its bytes as the file has them; touches nothing until they are used. None where they are read on demand.
        recipe: what gives the parameter's data from `parts`.
        device: where it is used.
    """

    name: str
    parameter: nn.Parameter
    parts: list[torch.Tensor]
    recipe: Recipe
    device: torch.device = CPU

    @property
    def is_made(self) -> bool:
        return self.recipe.make is not None

    def data(self) -> torch.Tensor:
        """Return what the parameter has for data while it is away: its place, or one element that is seen everywhere."""
        return self.parts[0] if self.parts and not self.is_made else self.away()

    def away(self) -> torch.Tensor:
        """Return one element that is seen everywhere."""
        return torch.zeros((), dtype=self.recipe.dtype, device=self.device).expand(self.parameter.shape)


class GroupWeights:
    """Owns the placement of one group's streamed parameters.

    Args:
        index: the group's.
        weights: its streamed parameters; none if all are resident.
        pages: indices of all its pages, in the order of the file.
        kept: those of them that stay once they were read.
        pager, keeper: as for training's groups.
    """

    def __init__(
        self,
        index: int,
        weights: Sequence[PagedWeight],
        pages: Sequence[int],
        kept: Sequence[int],
        pager: Pager,
        fault_handler: FaultHandler,
    ) -> None:
        self.index = index
        self.weights: Sequence[PagedWeight] = weights
        self._pager = pager
        key = ("param", index)
        self._all_pages = Access(key, tuple(pages))
        self.streamed = Access(key, tuple(page for page in pages if page not in set(kept)))
        self._kept = Access(None, tuple(kept))
        self.access = self._all_pages  # of the first use; then what is streamed
        self._was_used = False
        self._leases = 0
        self._versions: list[int] = []
        for weight in weights:
            guard(weight.parameter, fault_handler)
            set_cold(weight.parameter)

    @property
    def paged(self) -> bool:
        return bool(self.weights)

    @property
    def is_leased(self) -> bool:
        return self._leases > 0

    @property
    def streamed_pages(self) -> Sequence[int]:
        """What each pass reads of it, after the first."""
        return self.streamed.pages

    @property
    def accesses(self) -> list[Access]:
        """What a pass asks of the pager for it from now on, in order."""
        return [self.access] if self.access.pages else []

    @property
    def settled(self) -> bool:
        """Everything is in memory for good."""
        return not self.paged or (self._was_used and not self.streamed.pages and not self._makes)

    @property
    def kept_accesses(self) -> list[Access]:
        """What is leased for good by now."""
        return [self._kept] if self._was_used and self._kept.pages else []

    @property
    def pages(self) -> Sequence[int]:
        return self._all_pages.pages

    @property
    def kept_pages(self) -> Sequence[int]:
        """What stays once it was used."""
        return self._kept.pages

    def stream_all(self) -> int:
        """Nothing of it stays from now on. Returns how many pages may leave by that: none while it is in use, or was changed."""
        if self._leases or not self._was_used or not self._kept.pages or self._pager.written_at(self._kept):
            return 0
        if self.settled:
            self._dematerialize()
        kept, self._kept = self._kept, Access(None, ())
        self.access = self.streamed = self._all_pages
        self._pager.release(kept)
        return len(kept.pages)

    def lease(self) -> bool:
        """Bring the parameters in, if they are not, and keep them until `release`. Returns whether the pager was asked."""
        asks = self._leases == 0 and not self.settled
        if asks:
            self._pager.acquire(self.access)
            try:
                self._note_first_use()
                self._materialize()
            except BaseException:
                self._pager.release(self.streamed)
                raise
        self._leases += 1
        return asks

    def release(self) -> None:
        self._leases -= 1
        if self._leases == 0 and not self.settled:
            changed = self._changed()
            self._dematerialize()
            self._pager.release(self.streamed)
            self.refuse_change(changed)

    def forget_leases(self) -> None:
        """What held them is gone. The pager is told by itself."""
        self._leases = 0
        if not self.settled:
            self._dematerialize()

    def abandon(self) -> None:
        """The model is unloaded: whoever has a parameter still has one without data."""
        for weight in self.weights:
            if self.settled:
                unguard(weight.parameter)
            else:
                leave_cold(weight.parameter)
        self.weights = ()  # whoever has this group still shall not keep memory

    @property
    def _makes(self) -> bool:
        return any(weight.is_made for weight in self.weights)

    def _changed(self) -> str | None:
        """Return the name of a parameter that was changed while it was leased, if any was."""
        for weight, version in zip(self.weights, self._versions, strict=False):  # none, if warming failed
            if weight.parameter._version != version:
                return weight.name
        return None

    def refuse_change(self, name: str | None = None) -> None:
        """Forget what was written to weights that nobody leases, but for those that stay as they are for good.

        Args:
            name: of one that is known to have been changed.

        Raises:
            StateError: something was written; says where.
        """
        written = [] if self._leases or self.settled else self._pager.written_at(self._all_pages)
        if name is None and not written:
            return
        name = name or self._owner(*written[0])
        self._forget_change()
        raise StateError(
            f"parameter {name} was changed in a forward, or past its guard while it was away: {FOR_INFERENCE}. The change is undone"
        )

    def _owner(self, page: Page, at: int) -> str:
        """Return the name of the parameter that has byte `at` of the page's section, or the first one's."""
        address = page.section.memory.data_ptr() + at
        parts = [(weight.name, part) for weight in self.weights for part in weight.parts]
        found = (name for name, part in parts if 0 <= address - part.data_ptr() < max(part.nbytes, 1))
        return next(found, self.weights[0].name)

    def _forget_change(self) -> None:
        if self.kept_accesses:
            self._pager.release(self._kept)
        self._was_used, self.access = False, self._all_pages
        self._pager.forget_written(self.pages)

    def _note_first_use(self) -> None:
        """All pages are in memory and leased. Those that stay keep that lease; the next access is what is streamed."""
        if not self._was_used:
            self._was_used = True
            self.access = self.streamed

    def _materialize(self) -> None:
        for weight in self.weights:
            materialize(weight.parameter)
            if weight.parameter.requires_grad:
                raise StateError(
                    f"parameter {weight.name} requires a gradient, but {FOR_INFERENCE}: to train it, build the model in memory "
                    "and use swapper.SwapManager"
                )
            if weight.is_made:
                with torch.inference_mode(False), torch.no_grad():
                    weight.parameter.data = weight.recipe.from_parts(weight.parts)
        self._versions = [weight.parameter._version for weight in self.weights]

    def _dematerialize(self) -> None:
        for weight in self.weights:
            if weight.is_made:
                with torch.inference_mode(False):
                    materialize(weight.parameter)
                    weight.parameter.data = weight.data()
            set_cold(weight.parameter)

"""A group of parameters that are in memory while it is leased, and cold otherwise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch
from torch import nn

from swapper.errors import InvariantError
from swapper.modules.cold import leave_cold, unguard
from swapper.modules.home import GroupHome, Update
from swapper.tensors.torch_private import storage_of

_version_of = attrgetter("_version")


class LeasedGroup(ABC):
    """Counts the leases of one group. While there is one, kernels see the parameters in their home.

    Args:
        index: of the group.
        parameters: qualified name and parameter of each.
        tensors: their data at home.
        home: brings their bytes.
        paged: some of it is evicted between its uses.

    Attributes:
        own_storages: of `tensors`, as `storage_of` gives them.
        stays_materialized: from now on the parameters are there without a lease, until the home evicts them.
        catch_up: called before a lease brings anything, if the group's last update is deferred; see GroupParameters.
    """

    catch_up: Update | None = None
    stays_materialized = False

    def __init__(
        self,
        index: int,
        parameters: Sequence[tuple[str, nn.Parameter]],
        tensors: Iterable[torch.Tensor],
        home: GroupHome,
        paged: bool,
    ) -> None:
        self.index = index
        self.home = home
        self.paged = paged
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.own_storages = frozenset(storage_of(tensor) for tensor in tensors if tensor.numel())
        self._leases = 0  # of passes; they share one use of the home
        self._versions: list[int] = []  # of the parameters when they were leased

    @property
    def is_leased(self) -> bool:
        return self._leases > 0

    @property
    def settled(self) -> bool:
        """Whether everything stays in memory: a lease costs nothing."""
        return not self.paged or self.stays_materialized

    @property
    def storages(self) -> frozenset[int | None]:
        """Storages of parameters that become cold."""
        return self.own_storages if self.paged else frozenset()

    def lease(self) -> bool:
        """Bring the parameters, if need be, and keep them until `release`. Returns whether that is in the order of a pass."""
        if self._leases:
            self.home.wait_on_current_stream()
            self._leases += 1
            return False
        is_ordered = self.home.fetch(self.catch_up)
        self._leases = 1
        if self.stays_materialized:
            return False
        try:
            self._materialize()
        except BaseException:
            self.release()
            raise
        self._versions = list(map(_version_of, self.parameters))
        return is_ordered

    def release(self) -> None:
        """End a lease; after the last one the parameters are cold.

        Raises:
            InvariantError: there is none.
        """
        if not self._leases:
            raise InvariantError(f"group {self.index} ({', '.join(self.names[:1])} and others) is not leased")
        self.home.note_use()
        self._leases -= 1
        if self._leases:
            return
        changed: list[str] | None = None
        try:
            changed = self._changed()
        finally:
            try:
                self._give_back(changed is None or bool(changed))
            finally:
                if changed:
                    self._note_change(changed)

    def abandon(self, keep_cold: bool = True) -> None:
        """End its use. Parameters that stay in memory stay usable; the others stay cold for good if `keep_cold`."""
        stays = self.settled or self._is_referred_to()
        for parameter in self.parameters:
            if keep_cold and not self.settled:
                leave_cold(parameter)
            else:
                unguard(parameter)
        self.home.leave(stays)

    # --- what differs -----------------------------------------------------------------------------------------------

    @abstractmethod
    def _note_change(self, names: list[str]) -> None:
        """Note that these parameters were changed during the lease that ended."""

    def _is_referred_to(self) -> bool:
        """Return whether something of the user's refers to the parameters' memory."""
        return False

    def _give_back(self, changed: bool) -> None:
        """Make the parameters cold and give their memory back: the last lease ended."""
        if not self.settled:
            self._dematerialize()
        self.home.give_back()

    def _changed(self) -> list[str]:
        """Return the names of the parameters that were changed in place during the lease, as by nn.Embedding(max_norm=...)."""
        versions, self._versions = self._versions, []
        now = list(map(_version_of, self.parameters)) if versions else []  # none, if the lease failed
        if now == versions:
            return []
        pairs = zip(self.names, now, versions, strict=False)
        return [name for name, version, before in pairs if version != before]

    @abstractmethod
    def _materialize(self) -> None:
        """Have the parameters show what is at home."""

    @abstractmethod
    def _dematerialize(self) -> None:
        """Make the parameters cold, unless something else needs them."""

"""A group of parameters that are in memory while it is leased, and cold otherwise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from swapper.device.tier import DeviceCopy
from swapper.modules.cold import leave_cold, materialize, set_cold, unguard
from swapper.paging.planning.schedule import Access
from swapper.tensors.torch_private import uses_of_storage


class LeasedGroup(ABC):
    """Counts the leases of one group. A subclass reads its parameters in.

    Args:
        index: of the group.
        parameters: qualified name and parameter of each.
        image: of the group on an accelerator; None: kernels run on the CPU.

    Attributes:
        paged: some of it is evicted between its uses.
    """

    image: DeviceCopy | None
    paged: bool

    def __init__(
        self, index: int, parameters: Iterable[tuple[str, nn.Parameter]], image: DeviceCopy | None = None
    ) -> None:
        named = list(parameters)
        self.index = index
        self.image = image
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._leases = 0  # of passes; they share one of the pager's leases
        self._versions: list[int] = []  # of the parameters when they were leased

    @property
    def is_leased(self) -> bool:
        return self._leases > 0

    @property
    def settled(self) -> bool:
        """Whether everything stays in memory: a lease costs nothing."""
        return not self.paged

    @property
    @abstractmethod
    def storages(self) -> set[int]:
        """Storages of parameters that become cold, as `storage_of` gives them."""

    @property
    @abstractmethod
    def kept_accesses(self) -> Sequence[Access]:
        """The pager's leases that the group has even while no pass leases it."""

    def lease(self) -> bool:
        """Read the parameters in, if need be, and keep them until `release`. Returns whether the pager was asked for them."""
        if self._leases:
            self.wait_on_current_stream()
            self._leases += 1
            return False
        is_asked = self._fault_in()
        self._leases = 1
        if is_asked:
            try:
                self._materialize()
            except BaseException:
                self.release()
                raise
            self._versions = [parameter._version for parameter in self.parameters]
        return is_asked

    def wait_on_current_stream(self) -> None:
        """Have the current stream, which may not be the one of the lease, wait for the leased parameters."""
        if self.image is not None:
            self.image.storage.wait_on_current_stream()

    def release(self) -> None:
        """End a lease; after the last one the parameters are cold."""
        if self.image is not None:
            self.image.storage.note_use()
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

    def forget_leases(self) -> None:
        """Forget the leases of abandoned passes. The pager forgets its own by itself."""
        self._leases = 0
        self._versions = []
        if not self.settled:
            self._dematerialize()

    def abandon(self, keep_cold: bool = True) -> None:
        """End its use. Parameters that stay in memory stay usable; the others stay cold for good if `keep_cold`."""
        for parameter in self.parameters:
            if keep_cold and not self.settled:
                leave_cold(parameter)
            else:
                unguard(parameter)

    # --- what differs -----------------------------------------------------------------------------------------------

    @abstractmethod
    def _fault_in(self) -> bool:
        """Have the parameters' data at their addresses. Returns False if they are materialized already."""

    @abstractmethod
    def _give_back(self, changed: bool) -> None:
        """Make the parameters cold and give their memory back: the last lease ended."""

    @abstractmethod
    def _note_change(self, names: list[str]) -> None:
        """Note that these parameters were changed during the lease that ended."""

    def _changed(self) -> list[str]:
        """Return the names of the parameters that were changed in place during the lease, as by nn.Embedding(max_norm=...)."""
        versions, self._versions = self._versions, []
        now = zip(self.names, self.parameters, versions, strict=False)  # none, if the lease failed
        return [name for name, parameter, version in now if parameter._version != version]

    def _materialize(self) -> None:
        for parameter in self.parameters:
            materialize(parameter)

    def _dematerialize(self) -> None:
        for parameter in self.parameters:
            set_cold(parameter)


def storage_of(tensor: torch.Tensor) -> int | None:
    """Return the identity of a tensor's storage, on any device; None if it has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # sparse and opaque tensors, and those that functorch has wrapped
        return None


def count_uses(tensor: torch.Tensor) -> int:
    """Return how many tensors and arrays hold the storage of `tensor`, itself included; 0 if it has no memory of its own."""
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:  # a sparse tensor, or one that functorch has wrapped
        return 0
    return uses_of_storage(storage._cdata) - _OF_COUNTING


_OF_COUNTING = 0
_OF_COUNTING = count_uses(torch.empty(1, device="cpu")) - 1

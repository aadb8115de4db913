"""Takes the snapshot of a sharded model: a directory with a container of each rank, which torch.distributed.checkpoint reads.

Every rank publishes its container, `rank-R.pt`, as any snapshot (snapshot.py), into a hidden directory. Then the ranks
meet, each in a thread: rank 0 writes `.metadata`, which says where each rank's part of each tensor lies, and gives the
directory its name. So it appears whole, or not at all; what fails on one rank fails on all.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from swapper.durability.publication import SnapshotTicket
from swapper.durability.ranks import Ranks, describe_failure
from swapper.errors import CheckpointError, IoError, StateError
from swapper.formats.dcp_format import METADATA_NAME, METADATA_VERSION, ContainerItems, seal_metadata
from swapper.formats.torch_writer import Locate
from swapper.io import beneath
from swapper.io.replacing import make_parents
from swapper.tensors.torch_private import storage_info


class SnapshotDirectory:
    """One snapshot of a sharded model, on one rank.

    Args:
        path: of the directory; `Publisher.check_free` has passed.
        hidden: its name until it is whole, on the same file system. What a killed run left there is removed.
        ranks: with a group that only snapshots use.
        has_failed: returns True if this rank ends with an error, and must not wait for others.
        state: the result of loading: nested dicts and lists with DTensors.

    Attributes:
        file: of this rank, in the directory while it is hidden.

    Raises:
        CheckpointError: the directory cannot be made, or two entries of `state` have the same name.
    """

    def __init__(
        self, path: Path, hidden: Path, ranks: Ranks, has_failed: Callable[[], bool], state: dict[str, object]
    ) -> None:
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        self.path = path
        self._ranks = ranks
        self.has_failed = has_failed
        self._hidden = hidden
        self.file = self._hidden / f"rank-{ranks.rank}.pt"
        self._items = ContainerItems()
        self._planner = DefaultSavePlanner()
        try:
            self._planner.set_up_planner(_with_values(state), is_coordinator=ranks.rank == 0)
        except ValueError as error:
            raise CheckpointError(f"the snapshot {path} cannot be written: {error}") from error
        self._plan = _plan_of(self._planner)
        if ranks.rank == 0:
            try:
                _remove(self._hidden)  # of a run that was killed
                self._hidden.mkdir()
            except OSError as error:
                raise CheckpointError(f"cannot make the directory {self._hidden}: {error.strerror}") from error

    def items(self, locate: Locate, record_bytes: Mapping[str, int]) -> Callable[..., bytes]:
        """Return what makes the items of this rank's container. What is in memory is copied now.

        Args:
            locate: returns the place of a tensor in the payload records; None for one that is in memory.
            record_bytes: their sizes, by key.
        """
        for item in self._plan.items:
            if item.tensor_data is None:
                data: Any = self._planner.resolve_data(item)
                self._items.add(item.index, data.getvalue(), None, 0)
            else:
                tensor = local_part(self._planner.state_dict[item.index.fqn])
                place = locate(tensor) if tensor.numel() else None
                self._items.add(item.index, tensor, place, 0 if place is None else record_bytes[place.key])
        self._planner.state_dict = {}  # its tensors are the run's memory, and the ticket may outlive that
        return self._items.build

    def complete(self, failure: BaseException | None) -> BaseException | None:
        """Meet the other ranks, which all call this. Return the reason why the snapshot is not published, if it is not.

        Args:
            failure: the reason why this rank's file is not there, if it is not.
        """
        if self.has_failed():
            return failure or StateError(f"the snapshot {self.path} was not taken: this rank ended with an error")
        try:
            told = None if failure is None else describe_failure(failure)
            parts = self._ranks.gather_at_first((told, self._plan, self._items.places), f"the snapshot {self.path}")
            if parts is not None and not any(reason for reason, _, _ in parts):
                failure = self._publish([plan for _, plan, _ in parts], [places for _, _, places in parts])
            told = None if failure is None else describe_failure(failure)
            reasons = self._ranks.gather(told, f"the snapshot {self.path}")
        except Exception as error:  # a rank has ended
            failure = failure or error
        else:
            failed = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None]
            if failed and failure is None:
                failure = StateError(f"the snapshot {self.path} was not taken: it failed on {'; '.join(failed)}")
        if failure is not None:
            self.give_up()
        return failure

    def give_up(self) -> None:
        """Remove what there is of it."""
        with contextlib.suppress(OSError):
            _remove(self._hidden) if self._ranks.rank == 0 else self.file.unlink(missing_ok=True)

    def _publish(
        self, plans: Sequence[Any], places: Sequence[Mapping[object, tuple[int, int]]]
    ) -> BaseException | None:
        """Write the metadata, and give the directory its name. Return the error, if that fails."""
        from torch.distributed.checkpoint.metadata import StorageMeta

        try:
            _, metadata = self._planner.create_global_plan([*plans])
            metadata.storage_data = {
                index: storage_info()(f"rank-{rank}.pt", *place)
                for rank in reversed(range(len(places)))  # what several ranks have is the first one's
                for index, place in places[rank].items()
            }
            metadata.storage_meta, metadata.version = StorageMeta(), METADATA_VERSION
            path = self._hidden / METADATA_NAME
            beneath.replace_file(path, seal_metadata(pickle.dumps(metadata)), durable=True, mode=0o666)
            check_free(self.path)
            self._hidden.rename(self.path)
            beneath.sync(self.path.parent)
        except OSError as error:
            return IoError("publish", str(self.path), 0, 0, error.errno or 0)
        except CheckpointError as error:
            return error
        except Exception as error:  # of torch's planner
            return CheckpointError(f"the ranks' parts of the snapshot {self.path} do not fit together: {error}")
        return None


class DirectoryTicket(SnapshotTicket):
    """Of a snapshot of several ranks: it is over when all have their files, or one has failed.

    Args:
        directory: of the snapshot.
        previous: of the snapshot before it, whose end is waited for: the ranks meet for one after the other.
    """

    def __init__(
        self, directory: SnapshotDirectory, step: int, hurry: Callable[[], None], previous: DirectoryTicket | None
    ) -> None:
        super().__init__(directory.path, step, hurry)
        self._directory = directory
        self._previous = previous
        self._is_ending = threading.Lock()

    def finish(self, error: BaseException | None) -> None:
        """This rank's file is published, or failed with `error`."""
        if self._is_ending.acquire(blocking=False):
            thread = threading.Thread(target=self._complete, args=(error,), name="swapper snapshot", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads, as at the interpreter's exit
                self._complete(error)

    def fail(self, error: BaseException) -> None:
        """As `finish`, with an error that the caller raises too."""
        self._is_reported = True
        self.finish(error)

    def join(self) -> None:
        """Wait for the other ranks, if this one's file is published or failed, unless this rank ends with an error."""
        if self._is_ending.locked() and not self._directory.has_failed():
            self._over.wait()

    def _complete(self, error: BaseException | None) -> None:
        if self._previous is not None and not self._directory.has_failed():
            self._previous._over.wait()
        self._previous = None
        super().finish(self._directory.complete(error))


def local_part(value: object) -> Any:
    """Return the part of a DTensor that this rank has; anything else as it is."""
    return getattr(value, "_local_tensor", value)


def local_parts(state: Any) -> Any:
    """Return nested dicts and lists with the local parts of DTensors."""
    if type(state) in (dict, OrderedDict):
        return type(state)((key, local_parts(value)) for key, value in state.items())
    if type(state) in (list, tuple):
        return type(state)(local_parts(value) for value in state)
    return local_part(state)


def _with_values(state: Any) -> Any:
    """Return nested dicts with the tensor in place of a code that is a tensor of values: torch's reader converts its dtype."""
    if type(state) not in (dict, OrderedDict):
        return state
    if state.keys() == {"codec", "value"}:
        return state["value"]
    return type(state)((key, _with_values(value)) for key, value in state.items())


_last_plan: tuple[object, object] = (None, None)
"""What the last snapshot had, without its data, and the plan for that, which is made of it alone and takes a while."""


def _plan_of(planner: Any) -> Any:
    """Return the plan that `planner` makes for its state, without the parts of tensors that this rank has nothing of."""
    global _last_plan
    has = [(name, *_form(value)) for name, value in planner.state_dict.items()]
    has += [planner.is_coordinator, planner.mappings]
    if has != _last_plan[0]:
        plan = planner.create_local_plan()
        plan.items[:] = [item for item in plan.items if not _is_empty_part(item)]
        _last_plan = has, plan
    return _last_plan[1]


def _form(value: object) -> tuple[object, ...]:
    """Return what a plan has of an entry: of a tensor all but its values, of anything else nothing."""
    if not isinstance(value, torch.Tensor):
        return ()
    place = getattr(value, "device_mesh", value.device), getattr(value, "placements", None)
    return value.dtype, value.shape, value.stride(), value.requires_grad, value.layout, *place


def _is_empty_part(item: Any) -> bool:
    """Return True for the part of a rank that has none of a tensor: its offsets may be another rank's."""
    data = item.tensor_data
    return data is not None and data.chunk.sizes.numel() == 0 and data.size.numel() > 0


def check_free(path: Path) -> None:
    """Make missing directories above a snapshot's name. Raise CheckpointError unless it can get that name."""
    if os.path.lexists(path):
        raise CheckpointError(f"{path} exists already: snapshots never overwrite; choose another name or remove it")
    make_parents(path, CheckpointError)


def _remove(hidden: Path) -> None:
    """Remove a directory that has no name yet, and what ranks have written into it."""
    if not hidden.is_dir():
        return
    for file in [*hidden.glob("rank-*.pt"), hidden / METADATA_NAME]:
        file.unlink(missing_ok=True)
    hidden.rmdir()

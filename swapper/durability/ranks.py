"""Keeps the ranks of a job at a common step: they start from the same commit, and always have one to return to.

[Note: one step for all ranks] A rank may be killed at any instant, while the others are at another step. So each rank
keeps two commits on disk: the one that all ranks have ("agreed"), and its own last one. Before a rank writes anything
of the next step, it waits until all ranks have announced their last commit (`compare`, once a step). If that is the
same for all, it is the agreed one from then on, and the previous one is dropped, since its pages are about to be
overwritten; if not, the previous one stays, with its files. So at every instant there is a whole commit that all ranks
have. On a restart the ranks compare their commits (`choose`) and take the newest common one; a rank that is ahead
returns to it. After its update each rank tells the others whether it succeeded (`agree`): if not on all, all undo it.

[Note: a group of its own] Ranks communicate through swapper's own gloo group, on the CPU: its calls never mix with
those of the user's groups, whose order is the user's.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import os
import re
import socket
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from swapper.errors import ConfigError, DirectoryError, StateError
from swapper.runtime.free_memory import read_kernel
from swapper.tensors.torch_private import default_store, timeout_of_ranks

log = logging.getLogger("swapper")

RANKS_CHOICES = ("together", "alone")
REASON_WAIT_S = 5.0
"""Seconds in which the store of torch.distributed answers, unless its machine is gone: a choice."""

CommitId = tuple[int, int]
"""A step, and the number of changes of parameters from outside since."""

MAX_NUMBERS = 4
"""Of a comparison: all are of one size, so that ranks that come to different things find out."""

T = TypeVar("T")

_managers = itertools.count()
"""Of this process that run together with those of other ranks: all ranks make them in the same order."""


class CommitOfJob(Protocol):
    """What a comparison of ranks reads of a commit. See CommitRecord."""

    @property
    def job(self) -> str: ...

    @property
    def id(self) -> CommitId: ...


@dataclass(frozen=True)
class Held:
    """What a rank can resume from.

    Attributes:
        place: the host and the rank's directory, for a person.
        job: the run's, which all its ranks share; "" without one.
        commits: possible ones, the newest first.
    """

    place: str
    resume: str
    job: str
    commits: tuple[CommitId, ...]

    @classmethod
    def of(cls, place: str, resume: str, commits: Sequence[CommitOfJob]) -> Held:
        return cls(place, resume, commits[0].job if commits else "", tuple(commit.id for commit in commits))

    def describe(self) -> str:
        if not self.commits:
            return f"no commit ({self.place})"
        return f"{' or '.join(describe(commit) for commit in self.commits)} ({self.place})"


def describe(commit: CommitId) -> str:
    step, edits = commit
    return f"step {step}" + (f", changed {edits} times since" if edits else "")


def choose(held: Sequence[Held]) -> CommitId | None:
    """Return the newest commit that all ranks have; None to start over: there is none, or only of step 0. Pure.

    Raises:
        DirectoryError: the ranks do not match; lists what each has.
    """
    if len({each.resume for each in held}) > 1:
        raise DirectoryError(mismatch("resume= differs", [each.resume for each in held], "pass the same on all"))
    common = set.intersection(*(set(each.commits) for each in held))
    has_begun = any(step > 0 for each in held for step, _ in each.commits)
    jobs = {each.job for each in held}
    if not has_begun and (not common or len(jobs) > 1):
        return None  # killed before all ranks had their first commit
    remedy = (
        "put the missing directories back (each rank resumes from its own), or pass resume='reshard' if they went on from another "
        "number of ranks, whose directories are still here, or load a snapshot with resume='discard', which throws all of them away"
    )
    descriptions = [each.describe() for each in held]
    if any(not each.commits for each in held):
        raise DirectoryError(mismatch("some ranks have no run to resume, and others have one", descriptions, remedy))
    if len(jobs) > 1:
        runs = [f"run {each.job or 'of one rank alone'}, {each.describe()}" for each in held]
        raise DirectoryError(mismatch("the ranks' directories are of different runs", runs, remedy))
    if not common:
        raise DirectoryError(mismatch("there is no step that all ranks can resume from", descriptions, remedy))
    return max(common)


def mismatch(what: str, by_rank: Sequence[str], remedy: str) -> str:
    """Return an error's text with a line for each rank.

    Args:
        what: the first line.
        by_rank: a text for each rank.
        remedy: what the user can do.
    """
    lines = "\n".join(f"- rank {rank}: {text}" for rank, text in enumerate(by_rank))
    return f"{what}:\n{lines}\n{remedy[0].upper()}{remedy[1:]}"


class Ranks:
    """This process's place among the ranks that train together. Owns their group from construction until `close`.

    Args:
        rank, size: the place, and the number of ranks.
        group: of torch.distributed, over all ranks; None: this process is independent, whatever its number.
        is_early: torch.distributed is not initialized yet, if it will be.

    Attributes:
        has_failed: this rank ends with an error, and does not wait for others any more.
        lacks_one: another rank did not arrive at `gather`, or came to something else, so what that one did is unknown.
        start: random, and the same on all ranks; another one when they start again. Set by the code that opens the run.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None, *, is_early: bool = False
    ) -> None:
        self.rank = rank
        self.size = size
        self.has_failed = False
        self.lacks_one = False
        self.start = ""
        self._is_early = is_early
        self._group = group
        self._name = -1
        self._arrivals = itertools.count(1)
        self._background: Ranks | None = None

    @classmethod
    def find(cls, how: str = "together") -> Ranks:
        """Return this process's place: from torch.distributed if that is initialized, else from RANK and WORLD_SIZE.

        Args:
            how: "together", or "alone": each rank is an independent run.

        Raises:
            StateError: the other ranks do not arrive.
        """
        if not _is_initialized():
            rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
            return cls(rank, size, is_early=how == "together")
        rank, size = dist.get_rank(), dist.get_world_size()
        if how == "alone" or size == 1:
            return cls(rank, size)
        ranks = cls(rank, size)
        ranks._name = next(_managers)
        with _explained("the making of a SwapManager", ranks._sign_in()):
            ranks._group = dist.new_group(backend="gloo", timeout=timeout_of_ranks())
        return ranks

    def begin(self, check: Callable[[int | None], T]) -> T:
        """Call `check` on all ranks, and return its result. If that fails on one, or they run different versions, all fail.

        Args:
            check: gets the number of ranks on this machine; None if they are not together.

        Raises:
            ConfigError: the versions differ. If `check` failed here, its own error.
            StateError: `check` failed on another rank.
        """
        if self._group is None:
            return check(None)
        try:
            ranks_here = self.gather(boot_id(), "make a SwapManager").count(boot_id())
            checked, versions = self.settle("make a SwapManager", lambda: check(ranks_here), lambda _: versions_here())
            if len(set(versions)) > 1:
                raise ConfigError(mismatch("ranks run different versions", versions, "install the same everywhere"))
            return checked
        except BaseException:
            self.close()
            raise

    @property
    def are_together(self) -> bool:
        return self._group is not None

    def own_name(self, path: Path) -> Path:
        """Return this rank's file name for a `path` given to all ranks; rank 0 uses `path` itself."""
        named = re.search(rf"rank[-_]?{self.rank}(?!\d)", str(path))
        if not self.are_together or self.rank == 0 or named:
            return path
        return path.with_name(f"{path.stem}.rank-{self.rank}-of-{self.size}{path.suffix}")

    def check_still_so(self) -> None:
        """Raise StateError if ranks could run together by now, and could not when the manager was made."""
        if self._is_early and _is_initialized() and dist.get_world_size() > 1:
            raise StateError(
                "torch.distributed was initialized after the SwapManager was made, so ranks did not agree on the step to "
                "resume from: make it after init_process_group (with Lightning: in configure_optimizers), or pass ranks='alone'"
            )

    def gather(self, mine: T, what: str, missing: Callable[[], str] = lambda: "") -> list[T]:
        """Return what all ranks pass, by rank. All ranks must call it.

        Args:
            what: the next action, for an error.
            missing: names the ranks that have not come to it, if it can.

        Raises:
            StateError: a rank does not arrive.
        """
        if self._group is None:
            return [mine]
        found: list[Any] = [None] * self.size
        try:
            self.compare((), what, missing)
            with _explained(what, missing):
                dist.all_gather_object(found, mine, group=self._group)
        except StateError:
            self.lacks_one = True
            raise
        return found

    def gather_at_first(self, mine: T, what: str) -> list[T] | None:
        """As `gather`, but return it on rank 0 only; None on others."""
        if self._group is None:
            return [mine]
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with _explained(what):
            dist.gather_object(mine, found, dst=0, group=self._group)
        return found

    def in_background(self) -> Ranks:
        """Return the same ranks with a group for a thread's use. All ranks must call it first where none has ended yet: who
        makes a group waits for one that has until the timeout, and a member of a group learns at once that another has ended.
        """
        if self._group is None:
            return self
        if self._background is None:
            with _explained("manager.offload"):
                self._background = Ranks(
                    self.rank, self.size, dist.new_group(backend="gloo", timeout=timeout_of_ranks())
                )
        return self._background

    def settle(
        self, what: str, find: Callable[[], T], tell: Callable[[T], object], *, each_step: bool = False
    ) -> tuple[T, list[Any]]:
        """Call `find` on all ranks. If it fails on one, it fails on all, and nobody waits for that one.

        Args:
            what: the action, for an error.
            each_step: called too often to note who comes: a rank that does not is not named.

        Returns:
            Its result here, and the result of `tell` for that on each rank.

        Raises:
            StateError: it failed on another rank; names it and the reason. If it failed here, its own error.
        """
        if self._group is None:
            found = find()
            return found, [tell(found)]

        def meet(told: tuple[bool, object]) -> list[tuple[bool, object]]:
            return self.gather(told, what, (lambda: "") if each_step else self._sign_in())

        try:
            found = find()
            told = True, tell(found)
        except Exception as error:
            meet((False, describe_failure(error)))
            raise
        answers = meet(told)
        failed = [f"rank {rank}: {text}" for rank, (is_well, text) in enumerate(answers) if not is_well]
        if failed:
            raise StateError(f"another rank could not {what}, so this one does not either: {'; '.join(failed)}")
        return found, [answer for _, answer in answers]

    def _sign_in(self) -> Callable[[], str]:
        """Note in the store of torch.distributed that this rank comes to what all come to. Return what names those that do not."""
        number = next(self._arrivals)
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")  # torchrun keeps its store
        keys = [f"swapper/manager {self._name}/start {start}/rank {rank}" for rank in range(self.size)]
        store = default_store()
        with contextlib.suppress(RuntimeError):  # the store's rank has ended
            store.set(keys[self.rank], str(number))

        def missing() -> str:
            with contextlib.suppress(RuntimeError):
                late = [n for n, key in enumerate(keys) if not store.check([key]) or int(store.get(key)) < number]
                return f"rank {', '.join(map(str, late))} of {self.size}" if late else ""
            return ""

        return missing

    def compare(
        self, numbers: Sequence[int], what: str, missing: Callable[[], str] = lambda: ""
    ) -> list[tuple[int, ...]]:
        """Return the numbers of each rank, at most MAX_NUMBERS; as `gather`, and faster.

        Args:
            numbers: of this rank, whole ones of 64 bits.
            what: name of what the ranks come to, the same on all.
            missing: says what more is known if a rank does not arrive.

        Raises:
            StateError: a rank does not arrive, or comes to something else; names what each comes to.
        """
        padding = [0] * (MAX_NUMBERS - len(numbers))
        mark = zlib.crc32(
            re.sub(r"\d+", "", what).encode()
        )  # the same for any step: ranks at different steps meet, and say which
        mine = torch.tensor([mark, *numbers, *padding], dtype=torch.int64, device="cpu")
        found = [torch.empty_like(mine) for _ in range(self.size)]
        actions: list[Any] = [None] * self.size
        with _explained(what, missing):
            dist.all_gather(found, mine, group=self._group)
            told = [each.tolist() for each in found]
            if is_other := len({mark for mark, *_ in told}) > 1:
                dist.all_gather_object(actions, what, group=self._group)
        if is_other:
            remedy = "call the same on all of them, in the same order"
            raise StateError(mismatch("ranks have come to different things", actions, remedy))
        return [tuple(rest[: len(numbers)]) for _, *rest in told]

    def agree(self, failure: BaseException | None, what: str) -> None:
        """Raise StateError if `what` failed on another rank. All ranks must call it.

        Args:
            failure: the reason why it failed here, if it did.
        """
        if self._group is None:
            return
        if any(has_failed for (has_failed,) in self.compare([failure is not None], f"the end of {what}")):
            self.tell(failure, what)

    def tell(self, failure: BaseException | None, what: str) -> None:
        """Exchange the reasons why `what` failed, as all ranks know that it did. Raise StateError if it did not fail here."""
        reasons = enumerate(self.gather(None if failure is None else describe_failure(failure), f"the end of {what}"))
        others = [f"rank {rank}: {reason}" for rank, reason in reasons if reason is not None and rank != self.rank]
        if failure is None:
            raise StateError(
                f"{what} failed on another rank, so no rank takes it ({'; '.join(others)}). Catch this error on all ranks and "
                "repeat the step, or end all and restart with resume='auto'"
            )

    def explain(self, failure: BaseException) -> None:
        """Note that this rank ends with `failure`. Log the reasons of the ranks that ended first, or leave its own for others.

        A rank in a collective of the user's learns only that another has closed its connection.
        """
        if self._group is None or not _is_initialized():
            return
        self.has_failed = True
        exchange = threading.Thread(target=self._exchange_reasons, args=(describe_failure(failure),), daemon=True)
        exchange.start()
        exchange.join(REASON_WAIT_S)  # the machine with the store may be gone without a word

    def _exchange_reasons(self, reason: str) -> None:
        keys = [f"swapper/{self.start}/failure of rank {rank}" for rank in range(self.size)]  # torchrun keeps its store
        with contextlib.suppress(RuntimeError):  # the rank that has the store has ended
            store = default_store()
            reasons = {rank: store.get(key).decode() for rank, key in enumerate(keys) if store.check([key])}
            for rank, text in reasons.items():
                log.error("rank %d ended first: %s", rank, text)
            if not reasons:
                store.set(keys[self.rank], reason)

    def close(self) -> None:
        """Release the group. Idempotent."""
        if self._background is not None and not self.has_failed:  # else a thread may wait in it
            self._background.close()
        group, self._group = self._group, None
        if group is not None and _is_initialized():
            with contextlib.suppress(ValueError, RuntimeError):  # destroyed with the user's own
                dist.destroy_process_group(group)


def versions_here() -> str:
    """Return what runs on this rank."""
    metadata = importlib.import_module("importlib.metadata")  # takes a while
    return f"swapper {metadata.version('torch-swapper')}, torch {torch.__version__}"


def describe_failure(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {failure}"


def host_name() -> str:
    return socket.gethostname()


@cache
def boot_id() -> str:
    """Return what names this machine until it is started again."""
    return read_kernel("/proc/sys/kernel/random/boot_id").decode().strip()


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


@contextlib.contextmanager
def _explained(what: str, missing: Callable[[], str] = lambda: "") -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise StateError(
            f"{missing() or 'another rank'} did not arrive at {what}: it has ended, or takes another path ({error}). All ranks "
            "must take the same steps: one that skips optimizer.step() (infinities in its gradients, an empty batch) makes the "
            "others wait for it. Restart all with resume='auto': they resume from the newest step that all have. If each is a run "
            "of its own, pass SwapManager(ranks='alone')"
        ) from error

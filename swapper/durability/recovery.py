"""Keeps the commits that a run can resume from, and restores the content of one.

Nothing is copied: paged sections only learn their locations, resident ones are read. After a restart of the system, the
drive's content is compared with the checksums first, since a crash may have lost writes.

[Note: the way back] On a filesystem without reflinks, a snapshot is a second name of a swap file (publication.py):
writing into it or truncating it changes what the last commit names. So before a snapshot is published, the record of
the previous commit is kept next to that of the last one, as a fallback, and until the next commit the store does not
write to files that it names (`Store.spare`). A run that resumes meanwhile compares the last commit's content in shared
files with its checksums; if that is damaged, it resumes from the previous commit: it costs the snapshot and a step.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swapper.durability.commit import CommitRecord, SectionRecord, encode_commit, files_of, publish_commit, read_commit
from swapper.durability.directory import COMMIT_NAME, FALLBACK_NAME
from swapper.durability.ranks import CommitId, Ranks, boot_id, describe
from swapper.durability.verify import Fault, find_cut_off, find_damage
from swapper.errors import CheckpointError, ChecksumError, StateError
from swapper.io import beneath
from swapper.paging.host_memory import Pool
from swapper.paging.section import Page, Section, pieces_of
from swapper.paging.store.swap_files import Store

log = logging.getLogger("swapper")

REMEDY = "Say resume='discard' and load the last snapshot"


@dataclass(frozen=True)
class Commit:
    """A published commit.

    Attributes:
        id: known to all ranks.
        files: numbers of the swap files that it needs.
        sections: location of each section's content.
        script: as `digest_of_script` returns it, while it may change before the next forward; else b"".
    """

    id: CommitId
    data: bytes
    files: frozenset[int]
    sections: Sequence[SectionRecord]
    script: bytes = b""

    @property
    def step(self) -> int:
        return self.id[0]

    @classmethod
    def of(cls, record: CommitRecord, data: bytes, script: bytes = b"") -> Commit:
        return cls(record.id, data, files_of(record), record.sections, script)


class WayBack:
    """The previous commit, kept on disk with its files as long as it may be needed. See [Note: the way back].

    A rank alone needs it from the publication of a snapshot to the next commit. Ranks that run together need it from
    each commit until all have that one ([Note: one step for all ranks], durability/ranks.py).

    Args:
        directory: the run's.
        durable: the files are synced before a record, so that a commit survives a power loss.
        store: has the swap files.
        ranks: of the run.
        last: the last commit, if a run resumes from its record.
        before: the one before it, if that is still usable.
    """

    def __init__(
        self, directory: Path, durable: bool, store: Store, ranks: Ranks, last: Commit | None, before: Commit | None
    ) -> None:
        self.directory = directory
        self.durable = durable
        self.store = store
        self._ranks = ranks if ranks.are_together else None
        self._last = self._agreed = last
        self._before = before
        if before is not None:
            store.spare(before.files)

    @property
    def step(self) -> int | None:
        """The step that can be returned to by restarting; None if there is none."""
        is_there = self._before is not None and beneath.exists(self.directory / FALLBACK_NAME)
        return self._before.step if self._before is not None and is_there else None

    @property
    def commits(self) -> tuple[Commit | None, Commit | None]:
        """The last commit, and the previous one if its record is on disk as well."""
        return self._last, None if self.step is None else self._before

    @property
    def is_of_all_ranks(self) -> bool:
        """True if other ranks must agree."""
        return self._ranks is not None

    def prepare(self) -> None:
        """Keep the commit that all ranks have on disk, before a new one is published."""
        if self._ranks is not None and self._last is not None and self._last is self._agreed:
            keep_last(self.directory, self._last, self.durable)
            self._before = self._last

    def committed(self, commit: Commit) -> None:
        """Note that `commit` was published. If it is of the last step once more, what was kept for a snapshot of that stays."""
        is_kept = self._last is not None and self._last.step == commit.step and self.step is not None
        if self._ranks is None and not is_kept:
            beneath.unlink(self.directory / FALLBACK_NAME)
            if self._last is not None and self._last.id != commit.id:
                self._before = self._last
        self._last = commit

    def forget_script(self) -> None:
        """Note that the script may have changed its values since the last commit, and that nobody will ask."""
        if self._last is not None and self._last.script:
            self._last = dataclasses.replace(self._last, script=b"")

    def spared(self, is_snapshot: bool) -> frozenset[int]:
        """Return the files that must stay from now on; `is_snapshot`: a snapshot is about to be published."""
        is_of_snapshot = is_snapshot or self.step is not None
        is_needed = is_of_snapshot if self._ranks is None else self._agreed is not self._last
        return self._before.files if self._before is not None and is_needed else frozenset()

    def keep_for_snapshot(self) -> None:
        """Keep the previous commit before a snapshot is published: it may be a second name of the last one's files.

        Ranks have no such fallback: one of them could not return there alone.
        """
        if self._ranks is None and self._before is not None:
            publish_commit(self.directory, self._before.data, self.durable, FALLBACK_NAME)

    def forbids_linking(self, number: int) -> bool:
        """Return True if completing file `number` to a snapshot would overwrite what all ranks may return to."""
        before, last = self._before, self._last
        if self._ranks is None or before is None or last is None or last is self._agreed:
            return False
        pairs = zip(before.sections, last.sections, strict=True)
        return any(b == number != a for was, now in pairs for b, a in zip(was.files, now.files, strict=True))

    def before_change(self) -> None:
        """Protect the commit that all ranks have, before a write outside of a step.

        Raises:
            IoError: that needs another swap file, and there is no space for it.
        """
        if self._ranks is not None and self._agreed is not self._last:
            self.store.leave_spared()

    def before_step(self, step: int, failure: BaseException | None = None) -> bool:
        """Wait for all ranks: what all have is what they can return to. Return True if their last commit is the same.

        Args:
            failure: the reason why this rank cannot take it, if it cannot.

        Raises:
            StateError: another rank takes another step, cannot take this one, or does not arrive.
            IoError: as `before_change`.
        """
        if self._ranks is None:
            return True
        mine = self._last.id if self._last is not None else (-1, 0)
        answers = self._ranks.compare((failure is not None, step, *mine), f"step {step}")
        if any(has_failed for has_failed, *_ in answers):
            self._ranks.tell(failure, f"step {step}")
            return False  # this one has failed as well
        found = [answer[1:] for answer in answers]
        if len({number for number, *_ in found}) > 1:
            steps = ", ".join(f"rank {rank} step {number}" for rank, (number, *_) in enumerate(found))
            raise StateError(
                f"ranks are about to take different steps ({steps}), so no commit would be of all of them: one has skipped a "
                "step or failed in it. Take the same steps on all ranks and restart with resume='auto', or pass "
                "SwapManager(ranks='alone') if they are independent runs"
            )
        if any((number, edits) != mine for _, number, edits in found):
            commits = ", ".join(describe((number, edits)) for _, number, edits in found)
            log.info("before step %d ranks have committed %s: the commit of all is kept", step, commits)
            self._ranks.settle(f"take step {step}", self.before_change, lambda _: None, each_step=True)
            return False
        if self._before is not None:
            beneath.unlink(self.directory / FALLBACK_NAME)
            self._before = None
            self.store.spare(frozenset())
            self.store.release_frozen()
        self._agreed = self._last
        return True


def keep_last(directory: Path, last: Commit, durable: bool) -> None:
    """Copy the record of the last commit to the name of the previous one.

    Args:
        directory: of the run.
        last: the commit.
        durable: wait until the drive has it.
    """
    temporary = directory / f"{FALLBACK_NAME}.partial"
    beneath.unlink(temporary)
    try:
        beneath.link(directory / COMMIT_NAME, temporary)
    except OSError:  # a filesystem without hard links
        publish_commit(directory, last.data, durable, FALLBACK_NAME)
    else:
        beneath.rename(temporary, directory / FALLBACK_NAME)


def find_commits(directory: Path) -> list[CommitRecord]:
    """Return the commits that a run can resume from, the newest first: none, one or two.

    Raises:
        CheckpointError: the last commit's record is damaged, or of another version.
    """
    record, before = read_commit(directory), _read_fallback(directory)
    if record is None or before is None:
        return [] if record is None else [record]
    faults = find_damage(directory, record)
    if not faults:
        return [record, before]
    if find_damage(directory, before):
        return [record]
    log.warning("%s; the run resumes from step %d instead of %d", _say(faults), before.step, record.step)
    return [before]


def resume_from(
    directory: Path, commits: Sequence[CommitRecord], chosen: CommitId | None, keep_before: bool
) -> tuple[CommitRecord | None, Commit | None]:
    """Make the chosen one of `commits` the directory's last. Return it, and the previous one, if that is still usable.

    Args:
        commits: the result of `find_commits`.
        chosen: one of these.
        keep_before: the previous one may stay a fallback.

    Raises:
        CheckpointError: a snapshot that the chosen one needs was changed from outside.
    """
    record = next((found for found in commits if found.id == chosen), None)
    if record is None:
        return None, None
    last, before = read_commit(directory), commits[1] if len(commits) > 1 else None
    if last is not None and last.id == record.id:
        may_stay = before is not None and files_of(before) <= record.files.keys()
        if keep_before and before is not None and may_stay and not find_cut_off(directory, before):
            return record, Commit.of(before, encode_commit(before))
    else:
        if faults := find_damage(directory, record):
            raise CheckpointError(f"{_say(faults)}: start from a snapshot with resume='discard'")
        # Other files have changed.
        needed = files_of(record)
        record = dataclasses.replace(record, files={n: name for n, name in record.files.items() if n in needed})
        publish_commit(directory, encode_commit(record), durable=True)
    beneath.unlink(directory / FALLBACK_NAME)
    return record, None


def _read_fallback(directory: Path) -> CommitRecord | None:
    try:
        return read_commit(directory, FALLBACK_NAME)
    except CheckpointError as error:  # it may never be needed
        log.warning("the previous commit is not usable: %s", str(error))
        return None


def _say(faults: Sequence[Fault]) -> str:
    names = sorted({name for fault in faults for name in fault.tensors})
    lost = f", which lost {', '.join(names[:3])}{' and more' if len(names) > 3 else ''}" if names else ""
    return f"{faults[0].path}, the same file as a snapshot, was changed from outside ({faults[0].what}){lost}"


# --- restoring what the commit names


def follow_placement(record: CommitRecord, params: str, optimizer_state: str) -> tuple[str, str]:
    """Return the run's placement, if the user leaves it open. Raises CheckpointError: the user wants another one.

    Args:
        record: of the last commit.
        params, optimizer_state: the user's wishes: "nvme", "host" or "auto".
    """
    wishes = {"param": ("params", params), "state": ("optimizer_state", optimizer_state)}
    for family, (option, wish) in wishes.items():
        place = record.placement[family]
        if wish not in ("auto", place):
            raise CheckpointError(
                f"{option}={wish!r}, but the directory's run has {option}={place!r}: leave it out to resume as it was, "
                "or take a snapshot, pass resume='discard' and load it"
            )
    return record.placement["param"], record.placement["state"]


def page_bytes_of(record: CommitRecord) -> int | None:
    """Return the size of the run's pages, or None if none of its sections has more than one."""
    sizes = {section.piece_bytes for section in record.sections if len(section.files) > 1}
    return max(sizes, default=None)


def restore(record: CommitRecord, sections: Sequence[Section], store: Store, pool: Pool) -> None:
    """Restore every section's content as of the commit.

    Args:
        record: of the commit.
        sections: with memory if they are resident.
        store: of the run's files.
        pool: frames that pages are read into.

    Raises:
        CheckpointError: a file's content differs from the commit.
        IoError: a file cannot be read.
    """
    for section, places in zip(sections, record.sections, strict=True):
        pieces = pieces_of(section)
        if [piece.nbytes for piece in pieces[:1]] != [places.piece_bytes] or len(pieces) != len(places.files):
            raise CheckpointError(f"{section.plan.name} is divided differently than in the run. {REMEDY}")
        for piece, file, crc32 in zip(pieces, places.files, places.crc32s, strict=True):
            piece.location = piece.committed = file
            piece.crc32 = piece.committed_crc32 = crc32 if crc32 >= 0 else None
        if section.resident:
            _read(section.piece, store, section.memory.data_ptr())
    if record.boot_id != boot_id():
        _verify([page for section in sections for page in section.pages], store, pool)


def _verify(pages: Sequence[Page], store: Store, pool: Pool) -> None:
    """Read every page that has a checksum, and compare. Uses one free frame."""
    frame = pool.take()
    try:
        for page in [page for page in pages if page.crc32 is not None]:
            _read(page, store, frame.address)
    finally:
        pool.give(frame)


def _read(piece: Page, store: Store, address: int) -> None:
    try:
        store.read_now(piece, address)
    except ChecksumError as error:
        raise CheckpointError(f"{piece} does not have the content of the commit ({error}). {REMEDY}") from error

"""Decides when a step becomes durable, and commits it.

After a step's last write, when the next forward with autograd begins, the registered objects' state is captured, and
resident content is written if the policy requires it. So `scheduler.step()`, an evaluation, the update of an average and
changes by hand belong to the step. The commit record is published once nothing is in flight, usually during that forward,
and at the latest before the next step begins. A snapshot that the user requests is of that same step, and starts right
after the record. For a step with deferred updates the registered objects are captured at the same time, and the rest
after its last update.

[Note: free commits] If everything large that a step changes lives on NVMe, a commit writes only the record and sections
of a few KiB in addition to the step's own writes. The default policy, "free", commits each step in that case, and none
otherwise, or if state stays on a device. A number commits every that many steps, resident content too; None never does.

[Note: changes by hand] A script that resumes from a step does not do again what it did after it: that is in the
step's commit, so a process that is killed before its next forward resumes one step earlier. What follows the capture is
in the next commit, or in one that closing makes. A snapshot, parking and added groups capture before the next forward:
if the script changes settings, registered objects or `extra` after them, that forward, or closing, commits the step
again. Where ranks run together, which would have to agree, closing alone does: a commit with other settings gets another name, so
that ranks of which one is killed meanwhile resume from the one before; one with other objects or `extra`, which may be each
rank's own, keeps its name. Changes of parameters in memory are not announced. While a commit writes these from
there, a thread that changes one waits. Where ranks run together it could not, as gloo hangs if it may not receive into memory:
there the capture waits for these writes. They are compared with the last commit, and pages are searched for writes past the
guard, where it counts whether it has them: before a step (which is not undone then), before parking, and at the end. Where the
next step has begun, closing commits nothing: it would be a mix of two.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from swapper import _C
from swapper.durability.commit import (
    CommitRecord,
    SectionRecord,
    digest_of_script,
    digest_of_settings,
    encode_commit,
    publish_commit,
)
from swapper.durability.recovery import Commit, WayBack
from swapper.durability.snapshot import Publisher, Snapshot
from swapper.durability.verify import find_losses
from swapper.errors import CheckpointError, IoError, StateError
from swapper.io.engines import Transfer
from swapper.paging.layout import SMALL_SECTION_BYTES
from swapper.paging.pager import Pager
from swapper.paging.section import EXTERNAL, Page, Section, pieces_of
from swapper.runtime.interrupts import defer_signals

log = logging.getLogger("swapper")


def steps_between_commits(
    policy: str | int | None, sections: Sequence[Section], state_stays_elsewhere: bool = False
) -> int | None:
    """Return the number of steps from commit to commit, None for no commits. See [Note: free commits].

    Args:
        policy: "free", a number of steps, or None for no commits.
        sections: of the run.
        state_stays_elsewhere: some state is in no section, as on a device.
    """
    if policy == "free":
        large = state_stays_elsewhere or any(
            section.resident and section.plan.nbytes > SMALL_SECTION_BYTES and section.plan.external is None
            for section in sections
        )
        return None if large else 1
    return policy if isinstance(policy, int) else None


class State(Protocol):
    """The optimizer's state, as far as a commit record has it."""

    @property
    def packed_entries(self) -> dict[str, object]:
        """Return the entries of the state, for the record."""


class CommittedModel(Protocol):
    """What the committer needs of a model: updates of its last step may still be open."""

    @property
    def optimizer_state(self) -> State: ...

    @property
    def update_is_open(self) -> bool: ...

    def finish_update(self) -> None: ...

    def take_in_changed(self) -> None:
        """Finish the last step if parameters were assigned since (`parameter.data = x`), and have their values in the sections.

        What was written to shards since then belongs to that step too.
        """

    def sync_to_host(self) -> None:
        """Have the sections' content in host memory, also what is on a device."""


class Committer:
    """Decides when to commit, and does it.

    Args:
        model: what is to be committed.
        sections: all param and state sections.
        pager: what transfers go through.
        publisher: takes snapshots.
        way_back: keeps the previous commit; has the directory, and the store.
        describe: returns the record for a step, its `files`, `sections` and `state_entries` still empty.
        every: steps from commit to commit; None: no commits.
        committed: the committed step from which a run resumes; None if it is new.
        edits: how often parameters were changed from outside since the last step.
        is_trained: there is an optimizer, whose steps are committed.
    """

    def __init__(
        self,
        model: CommittedModel,
        sections: Sequence[Section],
        pager: Pager,
        publisher: Publisher,
        way_back: WayBack,
        describe: Callable[[int], CommitRecord],
        every: int | None,
        committed: int | None,
        edits: int,
        is_trained: bool,
    ) -> None:
        self._model = model
        self._sections = sections
        self._pager = pager
        self._store = way_back.store
        self._describe = describe
        self._resident_params = [section for section in sections if section.resident and section.plan.family == "param"]
        others = [section for section in sections if section.resident and section.plan.family != "param"]
        self._resident = [*self._resident_params, *others]
        self._every = every
        self._publisher = publisher
        self.committed = committed
        self._way_back = way_back
        self.edits = edits
        self._is_trained = is_trained
        self._is_behind = False  # changes from outside since the last commit are in no commit
        self._taken_in = pager.taken_in  # writes past the guard that the last commit has
        # The last record was captured before the next forward: the script may change more.
        self._is_early = (last := way_back.commits[0]) is not None and bool(last.script)
        self._settings = b""  # digest of those in the last commit, if that was captured early
        self._due: int | None = None  # the step to be written completely
        self._record: CommitRecord | None = None  # captured
        self._snapshot: Snapshot | None = None  # of the due step
        self._writes: list[tuple[Page, Transfer]] | None = None  # of resident sections, once submitted

    def step_done(self, step: int) -> None:
        """Note that a step, or the initial placement (step 0), is over; its writes may be in flight."""
        self.edits = 0
        self._is_early = False
        if self._every is not None and step % self._every == 0:
            self._due = step

    def enter(self, is_evaluation: bool = False) -> None:
        """Capture a due step, and publish it if nothing is in flight. Called at each use; cheap if nothing is due.

        Args:
            is_evaluation: of a forward without autograd: a trained model is captured at another use. [Note: changes by hand]

        Raises:
            IoError: as `finish`. Not with ranks together: they would wait in a collective for one that ends here. It is tried
                again before the next step, where they can all learn of it.
        """
        self._publisher.settle()
        is_of_next_step = not (is_evaluation and self._is_trained)
        if is_of_next_step and self._is_early and not self._way_back.is_of_all_ranks:
            self._take_in_script()
        if self._due is None or (self._record is None and not is_of_next_step):
            return
        try:
            self._capture(is_early=False)
            if self._publisher.reads_sources or self._writes is None:
                return
            if self._pager.writes_are_done() and all(ticket.done for _, ticket in self._writes):
                self._publish()
        except IoError as error:
            if not self._way_back.is_of_all_ranks:
                raise
            log.warning("step %s is not committed yet, and tried again before the next: %s", self._due, str(error))

    def before_step(self) -> None:
        """Finish the last step before everything changes, except while a snapshot copies from the last commit's files.

        Ranks that run together never make the exception: all must have the same commit. Call `meet_ranks` next.
        """
        self._model.finish_update()
        may_go_without = self._snapshot is None and not self._way_back.is_of_all_ranks
        if may_go_without and self._due is not None and self._publisher.reads_sources:
            self._drain()
            self._record = self._due = None
        self.finish()
        self.take_in_unannounced()

    def before_change_of_layout(self, verb: str) -> None:
        """Check that the previous commit's files may be removed, before `verb` ("add trained parameters").

        Raises:
            StateError: a rank may still need them.
        """
        if self._every is not None and not self.meet_ranks():
            raise StateError(f"ranks committed different steps: {verb} on all at the same place, right after a step")

    def meet_ranks(self, failure: BaseException | None = None) -> bool:
        """Wait for all ranks before a step. Return True if they have the same last commit. See WayBack.before_step."""
        if not self._way_back.is_of_all_ranks:
            return True
        counters = self._pager.counters
        step = counters.step + 1
        with counters.waiting("rank", f"to come to step {step}, which another does not take, or not yet"):
            return self._way_back.before_step(step, failure)

    def finish(self) -> None:
        """Finish the step; if a commit is due, write all changes, wait for them, and publish.

        Raises:
            IoError: a write failed, or the record could not be written. The previous commit stays the last one.
        """
        self._publisher.settle()
        self._model.finish_update()
        if self._due is not None:
            self._capture()
            self._pager.flush()
            self._publish()
        if self._every is None:
            self._store.release_frozen()

    def write_all(self, step: int) -> None:
        """Write everything as it is now, after `step`, and commit it if the run commits at all."""
        self.finish()
        self._due = step
        self.finish()
        self._publisher.finish()

    def take_in_unannounced(self) -> None:
        """Note unannounced changes by hand since the last commit, if that is of the present step. Call after `finish`.

        Raises:
            IoError: as `changed_from_outside`, or a page that was written past the guard could not be read or written.
        """
        if self.committed is None or self.committed != self._pager.counters.step:
            return
        self._pager.take_in_written()
        if self._pager.taken_in != self._taken_in or not all(map(self._is_committed, self._resident_params)):
            self.changed_from_outside()

    def commit_changes(self) -> None:
        """Commit the present step again, if its commit lacks changes from outside, or of the script's values."""
        self.take_in_unannounced()
        (last, _), step = self._way_back.commits, self._pager.counters.step
        if self._is_behind and self._every is not None and last is not None and last.step == step:
            self.write_all(step)
        elif self._is_early:
            self._take_in_script()
            self.finish()

    def _take_in_script(self) -> None:
        """Add to a record that was captured early what the script has changed since: settings, registered objects, `extra`.

        If it is published, the step is due again.
        """
        step, last = self._pager.counters.step, self._way_back.commits[0]
        with defer_signals:
            if self._due is not None and self._record is not None:
                edits, entries = self._record.edits, self._record.state_entries
                self._record = dataclasses.replace(self._describe(self._due), edits=edits, state_entries=entries)
            elif self.committed == step and last is not None and self._has_changed_since(last):
                has_other_settings = self._settings != digest_of_settings(self._describe(step))
                self.edits += has_other_settings or not self._way_back.is_of_all_ranks
                self._due = step
            self._is_early = False
            self._way_back.forget_script()

    def _has_changed_since(self, last: Commit) -> bool:
        return bool(last.script) and digest_of_script(self._describe(last.step)) != last.script

    @property
    def commits(self) -> tuple[Commit | None, Commit | None]:
        return self._way_back.commits

    def add_snapshot(self, step: int, snapshot: Snapshot) -> None:
        """Commit the step of `snapshot`, if the run commits at all, and then publish the snapshot.

        Call after `finish`, or when the last snapshot was of an earlier step.
        """
        self._due = step
        self._snapshot = snapshot
        try:
            self._capture()
        except BaseException as error:
            self._snapshot = None
            snapshot.ticket.finish(error)
            raise

    def before_change(self) -> None:
        """Prepare for a change by hand: it belongs to the due step, unless that is captured. [Note: changes by hand]

        Raises:
            IoError: as `finish` and `changed_from_outside`.
        """
        self._model.finish_update()
        if not self._is_of_due_step():
            self.before_change_in_pass()

    def before_change_in_pass(self) -> None:
        """Prepare for a forward that changes parameters, in the next step: commit the last one as it was. Raises as before."""
        self.finish()
        self.changed_from_outside()

    def changed_in_pass(self) -> None:
        """Note that a forward has changed parameters: an uncommitted step before it can no longer be committed.

        An evaluation belongs to that step itself.
        """
        if self._is_of_due_step():
            return
        self.changed_from_outside()
        if self._due is not None:
            self._drain()
            self._due = self._record = None
            self.end_snapshot("a forward changed parameters before the step was written: take it again")

    def _is_of_due_step(self) -> bool:
        """Whether a change belongs to the due step, as that is not captured yet. It is counted then."""
        is_so = self._due is not None and self._record is None
        self.edits += is_so
        return is_so

    def end_snapshot(self, why: str) -> None:
        """Fail the snapshot that waits for the writes of its step, if there is one."""
        if self._snapshot is not None:
            self._snapshot.ticket.finish(StateError(f"snapshot {self._snapshot.path} was not taken: {why}"))
            self._snapshot = None

    def changed_from_outside(self) -> None:
        """Note that the last commit lacks changes from outside, and will not be returned to.

        Raises:
            IoError: no space for another swap file, which ranks may need then.
        """
        self.committed = None
        self._is_behind = True
        self.edits += 1
        self._way_back.before_change()

    def can_roll_back(self, step: int) -> bool:
        """Return True if `step` is committed, so that the step after it can be undone."""
        return self.committed == step

    def roll_back(self, sections: Sequence[Section] | None = None) -> None:
        """Restore `sections`, or everything, from the last commit. Requires that the pager has discarded their frames.

        Raises:
            IoError: content in memory cannot be read back.
        """
        given = self._sections if sections is None else sections
        self._store.roll_back(piece for section in given for piece in pieces_of(section))
        for section in [section for section in given if section.resident]:
            self._store.read_now(section.piece, section.memory.data_ptr())

    @property
    def has_snapshot(self) -> bool:
        """True if a snapshot waits for the writes of its step."""
        return self._snapshot is not None

    def abandon(self) -> None:
        """Wait for writes of resident sections, whose memory is about to be freed; publish nothing."""
        self._due = None
        self._drain()
        self.end_snapshot("the manager was closed before its step was written")

    def _drain(self) -> None:
        """Wait for the writes of resident sections, whatever their outcome, and forget them."""
        writes, self._writes = self._writes, None
        for piece, ticket in writes or ():
            with contextlib.suppress(IoError):
                ticket.wait()
            piece.section.admit_writers()

    def _capture(self, is_early: bool = True) -> None:
        """Capture the state of the step; once its updates are done, submit the writes of resident content.

        They are waited for before the next step changes it; with ranks together, parameters at once. [Note: changes by hand]

        Args:
            is_early: no forward of the next step has begun.

        Raises:
            IoError: such a write failed. It is tried again.
        """
        if self._due is None or self._writes is not None:
            return
        if self._record is None:
            self._model.take_in_changed()
        with defer_signals:
            if self._record is None:
                self._record = dataclasses.replace(self._describe(self._due), edits=self.edits)
                self._is_early = is_early
            if self._model.update_is_open:
                return
            self._model.sync_to_host()
            entries = self._model.optimizer_state.packed_entries
            self._record = dataclasses.replace(self._record, state_entries=entries)
            self._store.prefer(self._store.newest())
            try:
                self._writes = [(s.piece, self._write(s)) for s in self._resident if not self._has_committed(s)]
            finally:
                self._store.prefer(None)
            if not self._way_back.is_of_all_ranks:
                for piece, ticket in self._writes:
                    piece.section.hold_writers(ticket)
        if self._way_back.is_of_all_ranks:
            self._wait_for([(piece, ticket) for piece, ticket in self._writes if piece.section.is_shown])

    def _has_committed(self, section: Section) -> bool:
        """Return True if the last commit has the section's present content.

        So it does if it is of this very step, as when a snapshot follows it, or if it is unchanged external content.
        """
        is_of_due_step = self._due is not None and self.committed == self._due
        return (is_of_due_step or section.piece.location == EXTERNAL) and self._is_committed(section)

    def _is_committed(self, section: Section) -> bool:
        """Return True if memory has of the section what the last commit has, of whatever step that is."""
        piece, memory = section.piece, section.memory
        if piece.location == EXTERNAL:  # unchanged external content stays in its file
            return _C.crc32_address(memory.data_ptr(), piece.stored_bytes) == piece.crc32
        is_there = piece.committed is not None
        return is_there and _C.crc32_address(memory.data_ptr(), piece.nbytes) == piece.committed_crc32

    def _write(self, section: Section) -> Transfer:
        ticket = self._store.write(section.piece, section.memory.data_ptr())
        self._pager.counters.written_bytes[section.plan.family] += section.piece.nbytes
        return ticket

    def _wait_for(self, writes: Sequence[tuple[Page, Transfer]]) -> None:
        try:
            for piece, ticket in writes:
                with self._pager.counters.waiting("write", piece):
                    ticket.wait()
        except BaseException:
            self._drain()  # resident content must be written again
            raise

    def _publish(self) -> None:
        if self._record is None or self._writes is None:
            return
        self._wait_for(self._writes)
        self._publisher.wait_for_sources()
        with defer_signals:
            for piece, ticket in self._writes:
                self._store.written(piece, ticket)
                piece.section.admit_writers()
            if self._every is not None:
                self._commit(self._record)
                self.committed = self._record.step
                self._is_behind = False
            self._record = self._due = self._writes = None  # only now: an earlier failure is retried
            if self._every is not None:
                self._store.commit(self._way_back.spared(self._snapshot is not None))
            else:
                self._store.release_frozen()
            if self._snapshot is not None:
                snapshot, self._snapshot = self._snapshot, None
                try:
                    if self._every is not None:
                        self._way_back.keep_for_snapshot()
                except IoError as error:
                    snapshot.ticket.finish(error)  # no snapshot without a fallback commit; the run continues
                else:
                    self._publisher.start(snapshot, self._way_back.forbids_linking)

    def _commit(self, record: CommitRecord) -> None:
        if self._way_back.durable:
            self._store.sync()
        self._check_frozen()
        self._store.check_whole()
        whole = dataclasses.replace(record, files=self._store.names, sections=self._places())
        data = encode_commit(whole)
        script = digest_of_script(record) if self._is_early else b""
        self._settings = digest_of_settings(record) if self._is_early else b""
        self._way_back.prepare()
        publish_commit(self._way_back.directory, data, self._way_back.durable)
        self._way_back.committed(Commit.of(whole, data, script))
        self._taken_in = self._pager.taken_in

    def _check_frozen(self) -> None:
        """Check snapshots that are swap files too for changes, and find out what the run loses.

        Raises:
            CheckpointError: something that the run needs is lost.
        """
        for number, path in self._store.changed_frozen().items():
            faults = find_losses(path, number, self._sections)
            if faults:
                names = sorted({name for fault in faults for name in fault.tensors})
                raise CheckpointError(
                    f"{path} was changed from outside ({faults[0].what}): it is the same file as a snapshot that was published "
                    f"by hard link, and the run needs it for {', '.join(names[:3])}{' and more' if len(names) > 3 else ''}. "
                    + self._ways_on()
                )
            if self._store.accept(number):
                log.warning("%s, a snapshot, was changed from outside; what the run needs of it is whole", path)

    def _ways_on(self) -> str:
        if self._way_back.step is not None:
            return f"End this process and restart with resume='auto': the run resumes from step {self._way_back.step}"
        return "Restore the snapshot, or start from another one with resume='discard'"

    def _places(self) -> list[SectionRecord]:
        records = []
        for section in self._sections:
            pieces = pieces_of(section)
            files = [piece.location if piece.location is not None else -1 for piece in pieces]
            crc32s = [piece.crc32 if piece.crc32 is not None else -1 for piece in pieces]
            records.append(SectionRecord(section.plan.nbytes, pieces[0].nbytes, files, crc32s))
        return records

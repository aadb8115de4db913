"""Opens and closes all parts of a session: resources, publisher, the offloaded model, committer, watchdog.

[Note: order of opening and closing] Opened: the manager's directory and lock; then the resources (modules/resources.py),
publisher, offloaded model, committer; last the gradients' memory. Closed in reverse: hooks first, so that no more pages
are requested; then snapshots; the resources; at the end the manager's lock.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from swapper.checkpoint.encoded_state import STATE_CODEC
from swapper.device.device import Device
from swapper.durability.commit import CommitRecord, files_of
from swapper.durability.committer import Committer
from swapper.durability.publication import SnapshotTicket
from swapper.durability.ranks import describe_failure
from swapper.durability.recovery import WayBack, keep_last, restore
from swapper.durability.snapshot import Publisher, Retention, Snapshot
from swapper.durability.snapshot_directory import SnapshotDirectory, local_parts
from swapper.errors import CheckpointError, StateError, SwapperError
from swapper.io.engines import Engine
from swapper.modules.resources import Resources
from swapper.paging.schedule import Schedule
from swapper.paging.section import Page, Section, pieces_of
from swapper.paging.store.scratch import ScratchFile, Stores
from swapper.paging.store.swap_files import Store
from swapper.runtime.free_memory import Watch, return_free_memory, watch_free_memory
from swapper.runtime.interrupts import close_all, defer_signals, forget
from swapper.runtime.notices import Watchdog, describe_waits, notify
from swapper.runtime.process import is_off
from swapper.train.gradients.grads import GradientStash
from swapper.train.groups.processor import Processor
from swapper.train.groups.session_guard import CLOSED, SessionEvents
from swapper.train.groups.train_device import ShardDevice, TrainingDevice
from swapper.train.layout.content import CarriedSource, CommittedFiles
from swapper.train.layout.inventory import find_places, find_trainables
from swapper.train.optimizer.optimizer_set import OptimizerSet
from swapper.train.planning.plan import Plan, chosen, summary
from swapper.train.session.offloaded_model import OffloadedModel
from swapper.train.session.origin import Origin
from swapper.train.session.placed_model import PlacedModel

log = logging.getLogger("swapper")


class TrainingSession:
    """Owns everything of one offloaded model at run time.

    Args:
        plan: of the session.
        origin: its start.
        current: what the session tells.
        describe: returns the commit record of a step, its `files`, `sections` and `state_entries` still empty.

    Attributes:
        sections: of parameters and optimizer state.

    Raises:
        DirectoryError: the drive has too little space.
        CheckpointError: the files do not have the commit's content.
    """

    _model: OffloadedModel | None = None
    _watchdog: Watchdog | None = None
    _free_memory: Watch | None = None

    def __init__(
        self, plan: Plan, origin: Origin, current: SessionEvents, describe: Callable[[int], CommitRecord]
    ) -> None:
        self._current = current
        self._describe_commit = describe
        self._counters = current.clock.counters
        self._directory = current.directory
        self.plan = plan
        self._resources = Resources[Stores](self._counters, _near(plan))
        self.sections = plan.make_sections()
        self._grad_sections = plan.make_grad_sections(sum(len(section.pages) for section in self.sections))
        try:
            self._open_resources(plan, origin)
            self.placed = PlacedModel(
                plan, self.sections, self._grad_sections, self.pager, current, self._open_processor(plan)
            )
            self._note_sizes(plan)
            self._log_choices(plan, origin)
            self._locate_content(origin)
            if not is_off("watchdog"):
                self._watchdog = Watchdog(self._counters, self._make_describe(), plan.request.manager.stall_s)
        except BaseException:
            self.close()
            raise

    def _open_resources(self, plan: Plan, origin: Origin) -> None:
        everything, options = [*self.sections, *self._grad_sections], plan.request.manager
        trainables = find_trainables(plan.inventory, find_places(everything))
        directory, device = self._directory, plan.request.device
        directory.require_space(plan.space_by_drive(max(plan.turns - len(origin.files), 0)))
        for section in everything:  # the CPU updates gradients and state, which come for that; FSDP2 reads shards
            by_device = plan.step.on_device if section.plan.family == "param" else plan.request.updates_there
            section.in_frames = device is not None and by_device
        self._resources.open(
            [*self.sections, *(section for section in self._grad_sections if section.pages)],
            plan.budget,
            directory.drives.directories,
            options.backend,
            partial(self._open_stores, plan, origin, options.check_reads),
            Schedule(plan.cycle(everything, trainables), plan.order_tolerance),
            None if device is None else device.device,
            window_pages=plan.window_pages,
            lazy=plan.lazy,
            max_deferred_writes=plan.max_deferred_writes,
        )
        self.pager, self._store = self._resources.pager, self._resources.store.swap_files
        retention, engine, inventory = Retention(self._directory.path), self._resources.engine, plan.inventory
        assert engine is not None
        self.publisher = Publisher(
            self.sections, plan.layout, engine, self._store, retention, inventory.unchanging, inventory.check_files
        )

    def _open_stores(self, plan: Plan, origin: Origin, check_reads: bool, engine: Engine) -> Stores:
        drives, layout = self._directory.drives, plan.layout
        needed = files_of(origin.commit) if origin.files and origin.commit is not None else None
        if needed is not None and origin.fallback is not None:
            needed |= origin.fallback.files
        store = Store(
            engine, drives, layout.headers(), layout.tail_offset, origin.files, plan.turns, stored_pieces(self.sections),
            origin.first_file, needed, check_reads,
        )  # fmt: skip
        pages = [page for section in self._grad_sections for page in section.pages]
        return Stores(store, ScratchFile(engine, drives, pages, check_reads) if pages else None)

    def _open_processor(self, plan: Plan) -> Processor:
        host_side, request = self._resources.host_side, plan.request
        if request.device is None or plan.on_device is None or host_side is None:
            return Processor(self.pager)
        return (ShardDevice if request.model.is_sharded else TrainingDevice)(
            request.device, plan.on_device, host_side, self.pager, self._counters, request.updates_there,
            plan.budget.spare_frames,
        )  # fmt: skip

    def _note_sizes(self, plan: Plan) -> None:
        budget, counters, bytes_of = plan.budget, self._counters, plan.inventory.family_bytes
        counters.pool_bytes = budget.page_bytes * budget.frame_count
        counters.frame_bytes, counters.resident_bytes = budget.page_bytes, budget.resident_bytes
        counters.state_bytes = bytes_of("param") + bytes_of("state")

    def _log_choices(self, plan: Plan, origin: Origin) -> None:
        """Log what was chosen and why, unless the session is opened again in this process."""
        if not origin.sections:
            resumed = "" if origin.commit is None else f"; resumed from step {origin.commit.step}"
            notify(f"offload: {summary(plan)}{resumed}")
            for name, text in chosen(plan, self._resources.describe()):
                log.info("offload: %s: %s", name, text)

    def _locate_content(self, origin: Origin) -> None:
        """Have the sections' content where the files of an earlier session have it, if they do."""
        if origin.files and origin.commit is not None:
            restore(origin.commit, self.sections, self._store, self._resources.pool)
        elif origin.sections:
            self._store.take_over(stored_pieces(self.sections), stored_pieces(origin.sections))
            for section in self.sections:
                if section.resident:
                    self._store.read_now(section.piece, section.memory.data_ptr())
        if origin.content is None:
            self.pager.back_cold_pages()
            self._restore_settings(origin)  # before the model changes, in case it fails

    def _restore_settings(self, origin: Origin) -> None:
        """Restore the optimizer's settings, and what of its state is not in sections.

        Raises:
            CheckpointError: the commit is of another optimizer.
        """
        try:
            if origin.commit is not None:
                self.placed.restore_groups(origin.commit.param_groups, origin.commit.members)
            if origin.entries is not None:
                self.placed.optimizer_state.entries.unpack(origin.entries)
        except (LookupError, TypeError, ValueError) as error:
            step = self._counters.step
            raise CheckpointError(
                f"the commit of step {step} has other settings or other state than this optimizer ({error!r}): build the "
                "same optimizer, or say resume='discard' to throw the run away"
            ) from error

    @property
    def engine(self) -> Engine | None:
        """The engine of all transfers; None when closed."""
        return self._resources.engine

    @property
    def model(self) -> OffloadedModel:
        if self._model is None:
            raise StateError("the model is not offloaded yet")
        return self._model

    @property
    def has_model(self) -> bool:
        """False if the session is closed or detached."""
        return self._model is not None

    def begin(self, origin: Origin, gradients: GradientStash | None) -> None:
        """Move the model to its sections, install the hooks, and commit it if nothing else has the content.

        Args:
            gradients: of an earlier session.
        """
        request, engine, values = self.plan.request, self._resources.engine, None
        if origin.init is not None:
            assert engine is not None
            values = request.model.initial_values(origin.init, engine, self.plan.inventory.external)
        self._adopt(origin)
        # After that: the gradients reuse the heap memory of the model's previous parameters.
        self._free_memory = watch_free_memory(request.manager.host_bytes)
        self._resources.add_memory([section for section in self._grad_sections if section.resident])
        self._model = OffloadedModel(self.placed)
        self.committer = self._make_committer(origin)
        if origin.is_new:
            self.committer.step_done(0)
        if values is not None:
            self.model.initialize(values)
            return_free_memory()  # what it made is not needed again
        self.placed.processor.move(request.model.module)  # buffers, with their initial values
        if gradients is not None:
            gradients.empty_into(self.model.gradients)
        if origin.replaced is not None:
            keep_last(self._directory.path, origin.replaced, request.manager.fsync)
        if origin.rewrites:
            self.committer.write_all(self._counters.step)

    def _make_committer(self, origin: Origin) -> Committer:
        directory, fsync = self._directory, self.plan.request.manager.fsync
        way_back = WayBack(directory.path, fsync, self._store, directory.ranks, origin.last, origin.fallback)
        return Committer(
            self.model, self.sections, self.pager, self.publisher, way_back, self._describe_commit, self.plan.commit_every,
            origin.committed, origin.edits, is_trained=bool(self.plan.inventory.forms),
        )  # fmt: skip

    def _adopt(self, origin: Origin) -> None:
        """Move the model to its sections, which the origin's content fills, unless the files have it."""
        for section in self.sections if origin.content is not None else ():
            if section.resident and section.plan.external is not None:
                crc32 = self._store.read_now(section.piece, section.memory.data_ptr())
                section.piece.crc32 = section.piece.committed_crc32 = crc32
        self.placed.adopt(origin.content)
        if origin.content is not None:
            self._restore_settings(origin)
        self.pager.flush()

    # --- relayout -----------------------------------------------------------------------------------------------------

    def carried(self, optimizers: OptimizerSet) -> CarriedSource:
        """Return the content of all sections, read from the files. Requires that everything is written."""
        return CarriedSource(optimizers, CommittedFiles(self.sections, self._store.paths))

    @property
    def file_names(self) -> set[str]:
        """Names of all swap files."""
        return {paths[0].name for paths in self._store.paths.values()}

    def to_reopen(self) -> Origin:
        """Return the origin of a session of the same plan that goes on where this one is detached."""
        files = {number: paths[0].name for number, paths in self._store.paths.items()}
        last, fallback = self.committer.commits
        origin = Origin(sections=self.sections, entries=self.placed.optimizer_state.packed_entries, files=files)
        committed, edits = self.committer.committed, self.committer.edits
        return replace(origin, committed=committed, last=last, fallback=fallback, edits=edits)

    def detach(self, why: str) -> None:
        """Close, and leave the model without data for another session to adopt. Requires that everything is written."""
        self.placed.expire()
        try:
            self._close(why, leaves=True)
        finally:
            forget(self, why)

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def snapshot(
        self,
        path: Path,
        more: Callable[[], dict[str, Any]],
        keep: int | None,
        has_frozen: bool,
        start: Callable[[], None],
    ) -> SnapshotTicket:
        """Take a snapshot as of the last step. See `SwapManager.snapshot`.

        Args:
            more: returns its content besides the model and the optimizer.
            has_frozen: include parameters that are not trained.
            start: called when a thread waits for it; starts it at once.
        """
        step = self._counters.step
        with self._current.turns.turn(), defer_signals:
            content = self._content(more, step)
            return self._take(self.publisher.capture(path, content, keep, has_frozen, step, start), step)

    def snapshot_directory(
        self, path: Path, more: Callable[[], dict[str, Any]], start: Callable[[], None]
    ) -> SnapshotTicket:
        """As `snapshot`, of a sharded model: all ranks call it with the same directory. See snapshot_directory.py."""
        step, ranks = self._counters.step, self._directory.ranks
        made: list[SnapshotDirectory] = []

        def begin() -> dict[str, Any]:
            self.publisher.check_free(path)
            content = self._content(more, step)
            hidden = path.with_name(f".{path.name}{self._directory.job and '.'}{self._directory.job}.partial")
            made.append(SnapshotDirectory(path, hidden, background, lambda: ranks.has_failed, content))
            return content

        with self._current.turns.turn(), defer_signals:
            background = ranks.in_background()
            try:
                with self._counters.waiting("rank", "to take this snapshot, which another does not, or not yet"):
                    content, told = ranks.settle("take a snapshot", begin, lambda content: (str(path), step))
                if len(set(told)) > 1:
                    named = "; ".join(f"rank {rank} {name} of step {of}" for rank, (name, of) in enumerate(told))
                    raise StateError(f"ranks take different snapshots ({named}): pass the same directory on all")
            except BaseException:
                for directory in made:
                    directory.give_up()
                raise
            (directory,) = made
            return self._take(self.publisher.capture_part(directory, local_parts(content), step, start), step)

    def _take(self, snapshot: Snapshot, step: int) -> SnapshotTicket:
        """Have a captured snapshot written after its step."""
        try:
            self.pager.write_back()
            self.committer.add_snapshot(step, snapshot)
        except BaseException as error:
            snapshot.ticket.finish(error)
            raise
        return snapshot.ticket

    def _content(self, more: Callable[[], dict[str, Any]], step: int) -> dict[str, Any]:
        """Return the content of a snapshot. Everything is where its tensors say, and no other snapshot is due."""
        if self.model.gathering.is_open:
            raise StateError("snapshot inside manager.gather: leave the gather first")
        self._current.check_between_steps("snapshot")
        self.publisher.raise_failure()
        self.plan.inventory.check_files()
        self.model.passes.abandon()
        self.model.finish_update()
        self.model.sync_to_host()
        if self.committer.has_snapshot:
            self.committer.finish()
        codecs = self.model.optimizer_state.codecs
        encoded = {STATE_CODEC: codecs} if codecs else {}
        return {**self.model.checkpoint(), **more(), "swapper": {"format": 1, "step": step, **encoded}}

    def roll_back(self, step: int, sections: Sequence[Section] | None = None) -> bool:
        """Restore `sections`, or all, to the state after `step`. Return False if that is impossible: then close."""
        if not self.committer.can_roll_back(step):
            return False
        if sections is None and self._resources.store.scratch is not None:
            return False  # gradients on NVMe are lost once they are used
        with defer_signals, suppress(SwapperError):
            self.placed.processor.finish()  # copies from and to the discarded frames
            if sections is None:
                self.pager.discard()
            else:
                self.pager.discard_pages(page.index for section in sections for page in section.pages)
            self.committer.roll_back(sections)
            self.pager.back_cold_pages()
            self.placed.processor.discard_changes(None if sections is None else {one.plan.group for one in sections})
            return True
        return False

    def finish(self) -> None:
        """Write changes back, commit them, and start pending snapshots, before a `close` without an error."""
        has_begun = self.model.updates.has_begun_early or self._current.step_is_open
        self.model.updates.drop()
        self.model.passes.abandon()
        try:
            self.model.finish_update()
            self.model.gathering.close()
            self.model.sync_to_host()
            self.pager.flush()
            self.committer.finish()
        except BaseException as error:
            self.committer.end_snapshot(describe_failure(error))
            raise
        if not has_begun:
            self.committer.commit_changes()

    def count_bytes(self) -> None:
        """Bring the counters up to date."""
        self._resources.count_bytes()

    def _make_describe(self) -> Callable[[], str]:
        """Return the function that makes the watchdog's dump; the watchdog's thread must not keep the session alive."""
        run = weakref.ref(self)
        return lambda: "the run is gone" if (alive := run()) is None else alive.describe()

    def describe(self) -> str:
        """Return a dump of waits, leases and transfers, several lines. Takes no lock."""
        where = f"step {self._counters.step + 1}, {self._current.clock.describe()}"
        return "\n".join([where, describe_waits(self._counters), self.pager.describe()])

    def close(self) -> None:
        """[Note: order of opening and closing]"""
        self._close(CLOSED, leaves=False)

    def _close(self, why: str, leaves: bool) -> None:
        """[Note: order of opening and closing]

        Args:
            leaves: the model is left to another session.
        """
        endings: list[Callable[[], object]] = []
        if self._watchdog is not None:
            endings.append(self._watchdog.stop)
        if self._model is not None:
            endings.append(partial(self._model.close, keep_cold=not leaves))
        if "placed" in vars(self):
            endings.append(partial(self.placed.close, keep_cold=not leaves))
            endings += [partial(self.placed.leave, why)] if leaves else []
            endings += [self.committer.abandon] if "committer" in vars(self) else []
            endings.append(self.publisher.finish)
        endings += [partial(self._release_model, why), self._resources.close]
        if self._free_memory is not None:
            endings.append(self._free_memory.end)
        close_all(endings)

    def _release_model(self, why: str) -> None:
        """Drop the model and its memory: a traceback may still refer to this session."""
        if self._model is not None:
            self._model.release(why)
        if "placed" in vars(self):
            self.placed.release(why)
            del self.placed
        self._model = None


def _near(plan: Plan) -> Device | None:
    """Return the accelerator that copies from host memory. FSDP2 copies to its mesh by itself."""
    if plan.request.device is not None:
        return plan.request.device.device
    return None if plan.request.model.device is None else Device(plan.request.model.device)


def stored_pieces(sections: Sequence[Section]) -> list[Page]:
    """Return all pages and resident sections."""
    return [piece for section in sections for piece in pieces_of(section)]

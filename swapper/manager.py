"""SwapManager: opens and closes everything, in one written order, and hands out the user's verbs.

[Note: order of opening and closing] Opened: directory and lock; then, by `offload`, arena, engine, store, pager, the
model's own part, the gradients' arena. Closed in reverse: hooks first, so that nobody asks for pages; then the pager
waits for all transfers; engine; files; arenas; lock. Tensors that still alias an arena keep its memory alive.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from swapper import _C
from swapper.checkpoint.container import ContainerLayout
from swapper.checkpoint.snapshot import publish
from swapper.config import PLACEMENTS, format_bytes, parse_choice, parse_host_memory
from swapper.core.budget import SMALL_SECTION_BYTES, Budget, divide, resident_bytes
from swapper.core.layout import SECTOR_BYTES, SectionPlan, round_up
from swapper.core.pager import Pager
from swapper.core.pool import Pool
from swapper.core.schedule import Schedule
from swapper.core.section import Section
from swapper.core.store import FILE_COUNT, Store
from swapper.directory import RESUME_CHOICES, RunDirectory
from swapper.errors import BudgetError, ConfigError, StateError
from swapper.stats import Stats
from swapper.train.inventory import (
    Inventory,
    expected_cycle,
    find_places,
    find_trainables,
    frames_needed,
    make_sections,
    take_inventory,
)
from swapper.train.model import OffloadedModel

log = logging.getLogger("swapper")


class SwapManager:
    """Pages a model's parameters and its optimizer's state between host memory and NVMe, within one budget.

    Args:
        directory: an existing directory on the drive that shall hold the run. The run lives in a directory of its own
            below it, `rank-R-of-W`, by the environment's RANK and WORLD_SIZE.
        host_memory: every host byte that swapper may hold, in bytes or as "8GiB"; "auto" takes half of what is free.
        resume: "error" refuses a directory that holds a run; "discard" throws that run away.
        backend: how transfers are made: "auto", "uring" or "threads".

    Raises:
        ConfigError: an option is not known.
        DirectoryError: the directory is missing, not writable, in use, or holds a run.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        host_memory: int | str = "auto",
        *,
        resume: str = "error",
        backend: str = "auto",
    ) -> None:
        self._host_bytes = parse_host_memory(host_memory)
        parse_choice(resume, "resume", RESUME_CHOICES)
        self._backend = parse_choice(backend, "backend", ("auto", "uring", "threads"))
        self._pid = os.getpid()
        self._closed = False
        self._failure: BaseException | None = None
        self._stats = Stats()
        self._registered: dict[str, Any] = {}
        self._model: OffloadedModel | None = None
        self._arenas: list[Any] = []
        self._engine: Any = None
        self._store: Store | None = None
        rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._directory = RunDirectory(directory, resume, rank, world_size)

    # --- the user's verbs -----------------------------------------------------------------------------------------

    def offload(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        params: str = "auto",
        optimizer_state: str = "auto",
        gradients: str = "auto",
        master_weights: torch.dtype | None = None,
    ) -> tuple[nn.Module, Optimizer]:
        """Move `model`'s parameters and `optimizer`'s state to where they shall live. Call it once.

        Args:
            model: on the CPU, with values; hooks are put into it.
            optimizer: over parameters of `model`. It is not used any more; the returned one takes its place.
            params, optimizer_state: "host", "nvme", or "auto" (in memory as far as the budget goes).
            gradients: "host" or "auto": they stay in host memory.
            master_weights: None does exactly what plain torch would do; torch.float32 keeps fp32 masters and fp32
                optimizer state beside bf16 and fp16 parameters.

        Returns:
            The same model object, and an optimizer that shares `optimizer.param_groups`.

        Raises:
            BudgetError: the budget is too small; says the smallest that works.
            UnsupportedError: this model or optimizer cannot be offloaded exactly.
            DirectoryError: the drive has not enough room.
            StateError: the manager is closed or has a model already.
        """
        self._check_usable()
        if self._model is not None:
            raise StateError("this manager has a model already: make one manager for each model")
        for option, value in (("params", params), ("optimizer_state", optimizer_state), ("gradients", gradients)):
            parse_choice(value, option, PLACEMENTS)
            if value == "device" or (option == "gradients" and value == "nvme"):
                raise ConfigError(f"{option}={value!r} is not available yet: use 'host' or 'auto'")
        inventory = take_inventory(model, optimizer, master_weights)
        try:
            return model, self._offload(model, optimizer, inventory, params, optimizer_state)
        except BaseException:
            self._release_resources()
            raise

    def register(self, **objects: Any) -> None:
        """Name objects with `state_dict`/`load_state_dict` that belong to a step (a scheduler, a sampler): snapshots hold them."""
        for name, value in objects.items():
            if not callable(getattr(value, "state_dict", None)) or not callable(
                getattr(value, "load_state_dict", None)
            ):
                raise ConfigError(f"register({name}=...) needs an object with state_dict() and load_state_dict()")
            self._registered[name] = value

    @contextmanager
    def gather(self, target: nn.Module | nn.Parameter | Iterable[nn.Parameter], write: bool = False) -> Iterator[Any]:
        """Have parameters in memory for the time of the context.

        Args:
            target: a module (with all below it), a parameter, or several.
            write: say True to change them; fp32 masters follow where the new value is another one.

        Raises:
            BudgetError: they do not fit into the pool at one time.
            StateError: parameters were changed without `write=True`, or are not of the offloaded model.
        """
        self._check_usable()
        if self._model is None:
            raise StateError("gather needs an offloaded model: call manager.offload first")
        if isinstance(target, nn.Module):
            parameters = list(target.parameters())
        elif isinstance(target, nn.Parameter):
            parameters = [target]
        else:
            parameters = list(target)
        with self._model.gather(parameters, write):
            yield target

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients' norm as torch.nn.utils.clip_grad_norm_ does; returns the norm before clipping."""
        self._check_usable()
        if self._model is None:
            raise StateError("clip_grad_norm_ needs an offloaded model: call manager.offload first")
        return nn.utils.clip_grad_norm_(self._model.model.parameters(), max_norm, norm_type)

    def snapshot(self, path: str | os.PathLike[str]) -> Path:
        """Write the whole state to `path`, a file that plain torch.load opens, and return its path.

        The file has "model" and "optimizer" (state dicts as torch makes them), "master" (fp32 masters by name, where there
        are any), "registered" and "swapper". It appears when it is whole.

        Raises:
            CheckpointError: `path` exists, or its directory does not.
            StateError: parameters are gathered, or the manager cannot be used.
            IoError: a transfer failed, or the drive is full.
        """
        self._check_usable()
        if self._model is None or self._store is None:
            raise StateError("snapshot needs an offloaded model: call manager.offload first")
        target = Path(path).absolute()
        if self._model.is_gathered:
            raise StateError("snapshot inside manager.gather: leave the gather first")
        self._model.abandon_pass()
        self._pager.flush()
        content = self._model.checkpoint()
        content["registered"] = {name: value.state_dict() for name, value in self._registered.items()}
        content["swapper"] = {"format": 1, "step": self._stats.step}
        publish(
            target, content, self._sections, self._layout, self._pager, self._pool.address, self._engine,
            self._store.create_file,
        )  # fmt: skip
        return target

    @property
    def stats(self) -> Stats:
        """Counters so far."""
        if self._engine is not None:
            self._stats.bytes_read = self._engine.bytes_read
            self._stats.bytes_written = self._engine.bytes_written
        return self._stats

    @property
    def step(self) -> int:
        """How many optimizer steps were taken."""
        return self._stats.step

    def close(self) -> None:
        """Write back what is changed and let everything go. Idempotent.

        Parameters that live on NVMe stay away: take a snapshot first, or gather them, to use the model without the manager.
        """
        if self._closed or os.getpid() != self._pid:
            return
        try:
            if self._model is not None and self._failure is None:
                self._model.abandon_pass()
                self._pager.flush()
        finally:
            self._closed = True
            self._release_resources()
            self._directory.close()

    def __enter__(self) -> SwapManager:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- opening and closing --------------------------------------------------------------------------------------

    def _offload(
        self, model: nn.Module, optimizer: Optimizer, inventory: Inventory, params: str, optimizer_state: str
    ) -> Optimizer:
        places, budget = self._choose_placement(inventory, params, optimizer_state)
        self._layout = ContainerLayout.plan([plan.nbytes for plan in inventory.plans])
        self._directory.require_space(FILE_COUNT * self._layout.tail_offset)
        offsets = [record.offset for record in self._layout.records]
        self._sections = make_sections(inventory.plans, offsets, lambda p: is_resident(p, places), budget.page_bytes)
        arena, frames_offset = self._attach_memory(self._sections, budget.pool_bytes)
        self._engine = _C.Engine(backend=self._backend, arena=arena)
        self._store = Store(self._engine, self._directory.path, self._layout.headers(), self._layout.tail_offset)
        pages = [page for section in self._sections for page in section.pages]
        self._pool = Pool(arena.address, frames_offset, budget.page_bytes, budget.frame_count)
        trainables = find_trainables(inventory, find_places(inventory, self._sections))
        schedule = Schedule(expected_cycle(inventory, self._sections, trainables, budget.page_bytes))
        self._pager = Pager(pages, self._pool, self._store, schedule, self._stats)
        self._note_sizes(inventory, budget, places)
        self._model = OffloadedModel(
            model, optimizer, inventory, self._sections, self._pager, budget.page_bytes, self._stats,
            self._check_usable,
        )  # fmt: skip
        paged = self._model.adopt(self._run_step)
        self._pager.flush()
        self._store.commit()
        _return_free_memory()  # where the parameters were; the gradients' memory comes after it, not on top of it
        grad_sections = make_sections(inventory.grad_plans, [0] * len(inventory.grad_plans), lambda _: True, 1)
        self._attach_memory(grad_sections, 0)
        self._model.start(grad_sections)
        return paged

    def _choose_placement(
        self, inventory: Inventory, params: str, optimizer_state: str
    ) -> tuple[dict[str, str], Budget]:
        """Return where each family lives, and the division of the budget.

        "auto" keeps in memory what leaves room to page the rest.
        """
        wishes = {"param": params, "state": optimizer_state}
        choices = [("host", "host"), ("host", "nvme"), ("nvme", "nvme")]
        error: BudgetError | None = None
        for choice in choices:
            places = dict(zip(wishes, choice, strict=True))
            if any(wish not in ("auto", places[family]) for family, wish in wishes.items()):
                if {**places, **{f: w for f, w in wishes.items() if w != "auto"}} != {"param": "nvme", "state": "host"}:
                    continue
                places = {"param": "nvme", "state": "host"}
            try:
                return places, self._divide(inventory, places)
            except BudgetError as too_small:
                error = too_small
        if error is None:
            raise ConfigError(f"params={params!r} with optimizer_state={optimizer_state!r} is contradictory")
        raise error

    def _divide(self, inventory: Inventory, places: dict[str, str]) -> Budget:
        def resident(plan: SectionPlan) -> bool:
            return is_resident(plan, places)

        kept = [p for p in inventory.plans if resident(p)]
        kept_bytes = resident_bytes([p.nbytes for p in kept])
        kept_bytes += resident_bytes([p.nbytes for p in inventory.grad_plans])
        explain = ", ".join(
            f"{name} {format_bytes(sum(p.nbytes for p in (*kept, *inventory.grad_plans) if p.family == family))}"
            for family, name in (("grad", "gradients"), ("param", "parameters"), ("state", "optimizer state"))
        )
        return divide(
            self._host_bytes,
            kept_bytes,
            [p.nbytes for p in inventory.plans if not resident(p)],
            lambda page_bytes: frames_needed(inventory, resident, page_bytes),
            explain,
        )

    def _attach_memory(self, sections: Sequence[Section], pool_bytes: int) -> tuple[Any, int]:
        """Make an arena: resident sections one after the other, then the pool. The other sections get a window each.

        Returns the arena and where in it the pool begins.
        """
        kept_bytes = resident_bytes([section.plan.nbytes for section in sections if section.resident])
        arena = _C.Arena(max(kept_bytes + pool_bytes, SECTOR_BYTES))
        self._arenas.append(arena)
        cursor = 0
        for section in sections:
            nbytes = section.plan.nbytes
            if section.resident:
                memory = torch.frombuffer(arena.view(cursor, nbytes), dtype=torch.uint8)
                section.attach(memory, None)
                cursor += round_up(nbytes, SECTOR_BYTES)
            else:
                window = arena.window(nbytes)
                section.attach(torch.frombuffer(window, dtype=torch.uint8)[:nbytes], window)
        return arena, kept_bytes

    def _note_sizes(self, inventory: Inventory, budget: Budget, places: dict[str, str]) -> None:
        self._stats.pool_bytes = budget.page_bytes * budget.frame_count
        self._stats.frame_bytes = budget.page_bytes
        self._stats.resident_bytes = budget.resident_bytes
        self._stats.state_bytes = inventory.family_bytes("param") + inventory.family_bytes("state")
        log.info(
            "offload: parameters on %s, optimizer state on %s; %d frames of %s; transfers by %s (%s), %s; memory %s",
            places["param"], places["state"], budget.frame_count, format_bytes(budget.page_bytes),
            self._engine.backend, self._engine.reason, self._store.io_mode if self._store else "",
            "page-locked" if self._arenas[0].locked else f"not page-locked ({self._arenas[0].lock_reason})",
        )  # fmt: skip

    def _release_resources(self) -> None:
        """[Note: order of opening and closing]"""
        if self._model is not None:
            self._model.close(keep_cold=True)
            self._pager.discard()
        if self._engine is not None:
            self.stats  # noqa: B018  # the engine's last counts
            self._engine.close()
        if self._store is not None:
            self._store.close()
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()
        self._engine = self._store = None

    # --- a step ---------------------------------------------------------------------------------------------------

    def _run_step(self) -> None:
        self._check_usable()
        if self._model is None or self._store is None:
            raise StateError("there is no offloaded model")
        if self._model.is_gathered:
            raise StateError("optimizer.step() inside manager.gather: leave the gather first")
        self._model.check_gradients()
        self._model.abandon_pass()
        try:
            self._pager.wait_for_writes()  # of the step before, long done: its files are what this step must not touch
            self._store.commit()
            self._model.update()
            self._pager.end_step()
        except BaseException as error:
            self._failure = error
            raise
        self._stats.step += 1

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise StateError(
                "the manager was touched in a forked child: it works only in the process that made it. "
                "Keep the model out of DataLoader workers, or start them by spawn"
            )
        if self._closed:
            raise StateError("the manager is closed: make a new one")
        if self._failure is not None:
            raise StateError(
                f"step {self._stats.step + 1} failed half-way ({self._failure}): memory and files hold a mix of two steps. "
                "Close the manager and go on from the last snapshot"
            ) from self._failure


def _return_free_memory() -> None:
    """Have the C library give freed heap memory back to the system, where it can (glibc): it keeps hundreds of MB otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def is_resident(plan: SectionPlan, places: dict[str, str]) -> bool:
    """Gradients, what is placed on the host, and what is too small for a frame of its own stay in memory."""
    return plan.family == "grad" or places[plan.family] == "host" or plan.nbytes <= SMALL_SECTION_BYTES

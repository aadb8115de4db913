"""Defines SwapManager: the user's calls on a run directory and its session.

train/session/training_session.py opens a session, and states the order of closing.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from swapper.capabilities import Feature, check
from swapper.device.device import Device
from swapper.durability.beginning import begin_run
from swapper.durability.directory import RESUME_CHOICES
from swapper.durability.publication import SnapshotTicket
from swapper.durability.ranks import RANKS_CHOICES, Ranks
from swapper.errors import ConfigError, StateError, UnsupportedError
from swapper.io.drives import weigh
from swapper.io.replacing import check_target, replacing
from swapper.options import Accelerator, CommitPolicy, ExternalWeights, check_at_once, parse_choice, parse_host_memory
from swapper.runtime.counters import MAX_SPANS, Counters, Trace, asked_for
from swapper.runtime.interrupts import close_all, defer_signals
from swapper.runtime.notices import is_interactive, notify
from swapper.runtime.process import is_off
from swapper.runtime.stats import LimitWatch, StepClock, StepStats
from swapper.train.optimizer.optimizer_set import HoldsOptimizers, give_back, unwrapped, wrapped_as
from swapper.train.planning.plan import Plan
from swapper.train.planning.request import ManagerOptions, OffloadOptions, Request
from swapper.train.session.first_session import FirstSession
from swapper.train.session.replacement import parked
from swapper.train.session.session_slot import SessionSlot
from swapper.train.session.training_step import UserState

log = logging.getLogger("swapper")

_managers: WeakSet[SwapManager] = WeakSet()

Optimizers = Optimizer | Sequence[Optimizer] | HoldsOptimizers | None


class SwapManager:
    """Pages a model's parameters and its optimizer's state between host memory and NVMe, within one budget.

    Args:
        directory: on the drive of the run. It and those above it are made, unless the outermost would be a new name in /,
            /mnt, /media or next to a mounted drive, or in an empty directory there. The run has a subdirectory
            `rank-R-of-W`, by the environment's RANK and WORLD_SIZE. Or a list of directories, one for each drive: pages are
            distributed by the speeds that `swapper tune` measured, equally if it did not.
        host_memory: maximum host bytes of swapper in this process, in bytes or as "8GiB". "64GiB/node" is for all ranks of a
            machine, which share it equally; so is "auto", half of the free memory.
        resume: "error" refuses a directory with a run; "auto" resumes from its last commit, or begins if there is none;
            "reshard" does too, and continues the run of another number of ranks if that is newer (see
            docs/guides/snapshots.md); "discard" deletes that run.
        ranks: "together": if torch.distributed is initialized, each of its ranks makes a manager; all resume from the
            newest step that each has committed, and take the same steps. "alone": each rank is a run of its own.
        commits: a swapper.CommitPolicy(...): the number of steps from commit to commit. By default each step is
            committed if parameters and optimizer state are on NVMe, else none.
        check_reads: compare reads from the swap files with checksums of the writes: bytes changed by the drive, memory
            or another program raise ChecksumError before a step uses them. False saves a few percent of a step that is
            limited by computing.
        rng: commits and snapshots include the states of the random number generators (Python's, torch's, NumPy's) at
            the end of their step, and a resumed run restores them in `offload`.
        backend: of transfers: "auto", "uring" or "threads".
        cold: for operations on a cold parameter outside of a forward that contains it: "read" brings it in for that
            operation, which may be in place; "raise" raises ColdParameterError.
        stall_s: seconds of one wait for the drive until the log gets a `dump`; None: never. SIGUSR1 requests one too,
            unless it has another handler (runtime/notices.py).

    Attributes:
        extra: a dict of the user's values that belong to a step (an epoch, a position in the data), in every commit and
            snapshot, and restored in a resumed run. Values at the first use after the step count, so set them where
            schedulers step.
        current: the present session, for swapper's other parts.

    Raises:
        ConfigError: an option is unknown.
        DirectoryError: the directory may be on a drive that is not mounted; it is not writable, in use, or has a run; or
            the ranks' runs do not fit together.
        CheckpointError: the last commit of the run to resume cannot be read.
        StateError: another rank could not make its manager.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        host_memory: int | str = "auto",
        *,
        resume: str = "error",
        commits: CommitPolicy | None = None,
        check_reads: bool = True,
        rng: bool = False,
        backend: str = "auto",
        cold: str = "read",
        stall_s: float | None = 60.0,
        ranks: str = "together",
    ) -> None:
        commits = CommitPolicy() if commits is None else commits
        parse_choice(ranks, "ranks", RANKS_CHOICES)

        def check(ranks_here: int | None) -> int:
            if not isinstance(commits, CommitPolicy):
                raise ConfigError(f"commits={commits!r} is not known: say commits=swapper.CommitPolicy(every=...)")
            parse_choice(resume, "resume", RESUME_CHOICES)
            parse_choice(backend, "backend", ("auto", "uring", "threads"))
            parse_choice(cold, "cold", ("read", "raise"))
            if stall_s is not None and not stall_s > 0:
                raise ConfigError(f"stall_s={stall_s!r} is not a time: use seconds, more than 0, or None")
            return parse_host_memory(host_memory, ranks_here)

        self._recording = ExitStack()  # of the trace that the environment requests
        self._clock = StepClock(Counters())
        self._counters = self._clock.counters
        self._clock.observers.add(LimitWatch())
        _close_earlier(directory)
        self._ranks = Ranks.find(ranks)
        host_bytes = self._ranks.begin(check)
        beginning = begin_run(directory, resume, self._ranks, weigh)
        self._directory, self._resumed, self._earlier = beginning.directory, beginning.resumed, beginning.earlier
        self._counters.step = self._resumed.step if self._resumed is not None else 0
        self._user = UserState(rng, self._resumed)
        self._options = ManagerOptions(
            host_bytes=host_bytes, commit_every=commits.every if commits.crash_resume else None, fsync=commits.fsync,
            drives=self._directory.drives, backend=backend, check_reads=check_reads, operates=cold == "read", stall_s=stall_s,
        )  # fmt: skip
        self.current = SessionSlot(self._directory, backend, self._clock, self._user)
        self._first = FirstSession(self.current, beginning)
        self._first.remove_strays()
        _managers.add(self)

    def offload(
        self,
        model: nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module],
        optimizer: Optimizers = None,
        plan: Plan | None = None,
        *,
        params: str = "auto",
        optimizer_state: str = "auto",
        gradients: str = "auto",
        master_weights: torch.dtype | None = None,
        update: str = "step",
        device: str | torch.device | Device = "cpu",
        device_memory: int | str = "auto",
        accelerator: Accelerator | None = None,
        external: ExternalWeights | None = None,
        state_codec: str | Mapping[str, str] = "exact",
        init: Callable[[nn.Module], Any] | str | os.PathLike[str] | None = None,
    ) -> tuple[Any, Any]:
        """Move `model`'s parameters and `optimizer`'s state to their placement. Call it once.

        Args:
            model: on the CPU, with values, or on the meta device, with `init`; it gets hooks. Several models that are
                used together (a policy and a reward model, an averaged copy) in a dictionary or list share the budget.
            optimizer: over parameters of `model`. Use the returned one instead from now on. None to train nothing.
                accelerate's, after `accelerator.prepare`, stays the same object and steps the returned one. Or a list of
                optimizers over different parameters, each with its own `step()`; or an object that holds such a list in its
                attribute `optimizers`, in which they are replaced.
            plan: a result of `manager.plan` for these, which is carried out. It includes all options below but `init`,
                so leave those out.
            params, optimizer_state: "host", "nvme", or "auto" (in memory as far as the budget allows). `params` may be
                "device": see `device_memory`. For a model that is updated on a device, so may `optimizer_state`: all of
                it stays there. With "auto" the state of as many groups stays as `device_memory` allows in addition to
                all parameters and gradients. Commits and snapshots copy it to NVMe or host memory.
            gradients: "host" and "auto" keep them in host memory. "nvme" writes each as it comes; `parameter.grad` then
                shows that it exists and can be clipped, scaled and zeroed, but not read. For a model that is updated on
                a device, "device" keeps all there, as ordinary tensors, and "auto" those of as many groups as
                `device_memory` allows in addition to all parameters.
            master_weights: None computes exactly as plain torch; torch.float32 keeps fp32 masters and fp32 optimizer
                state for bf16 and fp16 parameters.
            update: "step" updates all parameters in `optimizer.step()`. "deferred" only fixes the step there, and
                updates each group when the next forward reaches it, which saves one read; the results are the same, and
                an earlier access to parameters, state or gradients finishes the step. "backward" updates each group
                when backward has finished with it; docs/reference/training.md lists what that excludes.
            device: of forwards and backwards: "cpu", "cuda", "cuda:1", ... Inputs must be there; the model may be.
                `parameter.grad` has no data then, unless gradients stay there.
            device_memory: maximum bytes, or "8GiB", of parameters on the device; "auto" is half of the free memory.
                What fits stays from forward to backward; params="device" requires that all of them fit.
            accelerator: a swapper.Accelerator(...): how a model on a device is updated. By default your optimizer does
                it there, with the results of plain torch on that device.
            external: a swapper.ExternalWeights(path=...): your files of the frozen parameters, which are read in place.
                By default all parameters are copied to the run's directory.
            state_codec: how the optimizer's state is stored. "exact" (the default): as it is. "split": fp32 masters of bf16
                parameters in 2.125 bytes instead of 4, without loss. "bf16": the same, and moments in bf16. "8bit": masters
                in 1 byte in addition to the parameter, moments in 8 bits with a scale for each 32. Or a map from state key
                ("exp_avg", "exp_avg_sq", "master", ...) to "exact", "split", "master24", "bf16", "moment8", "variance8".
                docs/reference/optimizers.md says which tensors are encoded. Your optimizer sees fp32.
            init: the source of values for a model on the meta device: a function that fills the parameters and buffers
                of the given module, or the path of a checkpoint (safetensors, Hugging Face directory, torch, DCP). They
                are filled group by group, so that the model is never whole in memory. A resumed run does not use it.

        Returns:
            `model`, the same object, and an optimizer that shares `optimizer.param_groups` (None for None). For a list, a
            list of optimizers; for an object that holds them, the same object.

        Raises:
            ConfigError: an option is unknown, or options do not go together.
            BudgetError: the budget is too small; names the smallest that works.
            UnsupportedError: this model or optimizer cannot be offloaded exactly.
            DirectoryError: the drive has too little space.
            CheckpointError: the run to resume is another one; the path in `init` or `external` is no checkpoint, or a
                damaged one; `external` does not fit the model.
            DeviceError: there is no such device, or it failed.
            IoError: a transfer failed.
            StateError: the manager is closed or has a model already; the model has another manager; `plan` is for
                something else, or outdated.
        """
        self.current.check()
        self._ranks.check_still_so()
        if self.current.run is not None:
            raise StateError(
                "this manager has a model already: give several at once, offload({'policy': a, 'reference': b}, optimizer), or "
                "make one manager for each"
            )
        inner = unwrapped(optimizer)
        options = OffloadOptions(
            params=params, optimizer_state=optimizer_state, gradients=gradients, master_weights=master_weights, update=update,
            device=device, device_memory=device_memory, accelerator=accelerator, external=external, state_codec=state_codec,
        )  # fmt: skip
        if plan is not None:
            if not isinstance(plan, Plan):
                raise ConfigError(f"plan={plan!r} is not known: give manager.plan's, or keywords as params='nvme'")
            options.check_none_given()
            plan.request.check_is_for(model, inner, self._options)

        def make() -> Plan:
            request = Request.of(model, inner, options, self._options) if plan is None else plan.request
            return self._first.plan(request, init is not None, plan)

        try:
            paged = self._first.open(make, init)
            if (path := asked_for(self._ranks.rank)) is not None:
                self._recording.enter_context(self.trace(path))
            return model, None if optimizer is None else wrapped_as(optimizer, give_back(inner, paged))
        except BaseException:
            self._first.give_up()
            raise

    def plan(
        self,
        model: nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module],
        optimizer: Optimizers = None,
        *,
        params: str = "auto",
        optimizer_state: str = "auto",
        gradients: str = "auto",
        master_weights: torch.dtype | None = None,
        update: str = "step",
        device: str | torch.device | Device = "cpu",
        device_memory: int | str = "auto",
        accelerator: Accelerator | None = None,
        external: ExternalWeights | None = None,
        state_codec: str | Mapping[str, str] = "exact",
    ) -> Plan:
        """Return the plan of `offload`: placement, memory, space, bytes of a step, wear. Changes nothing. `print` it.

        Pass it to `offload`, or call that with the same keywords. A resumed run keeps its layout.

        Args: as of `offload`; parameters may be on the meta device.

        Raises: as `offload`, except errors that only files, drives and `init` can cause.
        """
        self.current.check_usable()
        options = OffloadOptions(
            params=params, optimizer_state=optimizer_state, gradients=gradients, master_weights=master_weights, update=update,
            device=device, device_memory=device_memory, accelerator=accelerator, external=external, state_codec=state_codec,
        )  # fmt: skip
        return self._first.plan(Request.of(model, unwrapped(optimizer), options, self._options), may_be_meta=True)

    def fastest(
        self,
        model: nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module],
        optimizer: Optimizers = None,
        *,
        tokens: int,
        example: Sequence[Any] | Mapping[str, Any] | None = None,
        drive_read: int | str | None = None,
        drive_write: int | str | None = None,
        state_codecs: Sequence[str | Mapping[str, str]] = ("exact",),
        updates: Sequence[str] = ("step", "deferred"),
        **options: Any,
    ) -> Plan:
        """Return the plan whose step is predicted to be the shortest within the budget. Print it, and pass it to `offload`.

        It tries each placement of parameters and state, each time of the update, and each codec of `state_codecs`, by simulation;
        settings within 1 % count as equal, and the simplest is chosen. The computing is measured once, in some seconds.

        Args:
            model, optimizer: as of `offload`, which gets the plan.
            tokens, example, drive_read, drive_write: see `Plan.predict`.
            state_codecs: that may be used; codecs other than "exact" and "split" change results.
            updates: that may be used. "backward" excludes clipping and more (docs/reference/training.md): it is not tried unasked.
            options: of `offload`, which are not tried then: params="nvme", master_weights=torch.float32, ...

        Raises: as `plan` and `Plan.predict`.
        """

        def plan_for(**chosen: Any) -> Plan:
            return self.plan(model, optimizer, **chosen)

        if unknown := options.keys() - {one.name for one in fields(OffloadOptions)}:
            raise ConfigError(f"{', '.join(sorted(unknown))}: not an option of manager.offload")
        codecs = [options["state_codec"]] if "state_codec" in options else state_codecs
        updates = [options["update"]] if "update" in options else updates
        from swapper.forecast.step import choose_fastest

        plan = choose_fastest(plan_for, options, codecs, updates, tokens, example, (drive_read, drive_write))
        log.info("fastest: %s", plan.found.why)
        return plan

    def register(self, **objects: Any) -> None:
        """Register objects with `state_dict` and `load_state_dict` that belong to a step (a scheduler, a sampler).

        Commits and snapshots include their state; a resumed run loads its last commit's state into them here. A scheduler's
        constructor sets rates of a first step: the optimizer then gets its settings of that commit again.

        Raises:
            ConfigError: an object lacks these methods, or torch.load(weights_only=True) could not read its state.
        """
        self.current.training_step.register(objects)

    @contextmanager
    def gather(self, target: nn.Module | nn.Parameter | Iterable[nn.Parameter], write: bool = False) -> Iterator[Any]:
        """Hold parameters in memory within the context, or on the device if the model runs there.

        Args:
            target: a module (with its submodules), a parameter, or several; `as` returns it.
            write: True to change them; fp32 masters are updated if the new value differs.

        Raises:
            BudgetError: they do not fit the pool, or the device, at once.
            IoError: they could not be read.
            StateError: parameters were changed without `write=True`, or are not the model's; or backward has updated
                some of them before their `optimizer.step()`.
        """
        with self.current.turns.turn():
            self.current.check_usable()
            run = self.current.running("gather")
            run.model.finish_update()
        if isinstance(target, nn.Module):
            parameters = list(target.parameters())
        elif isinstance(target, nn.Parameter):
            parameters = [target]
        else:
            parameters = list(target)
        if write:
            with self.current.turns.turn():
                self.current.check_to_write()
        with run.model.gathering.gather([run.model.model.paged(p) for p in parameters], write):
            yield target

    def parked(self) -> AbstractContextManager[None]:
        """Return a context without the model's host and device memory, for another phase: generation, evaluation elsewhere.

        What only memory has is written first, and committed if the run commits. In the context parameters keep identity,
        shape and dtype, and every use of their data, of the optimizer or of the manager's verbs is refused. The memory is
        taken again at its end, also after an exception: pages are read when they are needed. Training continues bit for bit.
        With ranks together, all of them call it after the same step.

        Raises:
            StateError: no model is offloaded; in the middle of a forward, backward, gather or training step; a snapshot is
                being written; a parameter has a gradient; or within another such context.
            UnsupportedError: fully_shard has sharded the model.
            IoError: changes could not be written; at the end: the system has no memory, or the files cannot be read. The
                manager can then only be closed.
        """
        return parked(self.current)

    def one_step(self) -> AbstractContextManager[None]:
        """Return a context whose optimizer steps are one training step: counted, committed and resumed from as one.

        For a loop in which one of several optimizers steps more often than another (a GAN's), or one optimizer several
        times. Without it a training step has one `step()` of each optimizer, in any order, and is over with the last. A
        context that ends by an exception does not end the training step: the next one continues it.

        Raises:
            StateError: no model is offloaded; or within another such context.
            UnsupportedError: with `update="backward"`.
        """
        return self.current.one_step()

    def accumulate(self) -> AbstractContextManager[None]:
        """Return a context for all backwards of a step but the last, as DDP's no_sync.

        Needed with `update="backward"`, where a backward outside of it updates; without effect otherwise.
        """
        return self.current.running("accumulate").model.updates.accumulating()

    def accumulate_batches(
        self, loss_fn: Callable[[Any], torch.Tensor], batches: Iterable[Any], *, at_once: int | None = None
    ) -> list[torch.Tensor]:
        """Run forward and backward of all micro-batches of a step, and return their losses, detached.

        Losses, gradients and random numbers are those of `for batch in batches: loss_fn(batch).backward()`, bit for bit;
        but all micro-batches pass through a group of parameters before the next group is read, in forward and in
        backward, so reading costs as much as for one. Their graphs are in memory together. See docs/reference/training.md.

        Args:
            loss_fn: returns the loss of a micro-batch, scaled as it is to count; called in threads, one of which runs.
            batches: its arguments, one for each call.
            at_once: micro-batches that run together. None: all.

        Raises:
            ConfigError: `at_once` is not positive.
            UnsupportedError: they cannot run together exactly; see docs/reference/training.md.
            StateError: the manager cannot be used, or `loss_fn` does what only its caller may.
            The first exception of a micro-batch, after all were stopped. In a forward: gradients are unchanged. In a
            backward: all gradients are None.
        """
        check_at_once(at_once)
        run = self.current.running("accumulate_batches")
        check({*run.plan.request.features, Feature.ACCUMULATE_BATCHES})
        left, losses = list(batches), []
        while left:
            some, left = left[:at_once], left[len(left[:at_once]) :]
            with run.model.updates.accumulating() if left else nullcontext():
                losses += run.model.passes.accumulate(loss_fn, some)
        return losses

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients' norm as torch.nn.utils.clip_grad_norm_, and return the norm before it, of shape ().

        Raises:
            UnsupportedError: with `update="backward"`: the gradients are used already. So does `clip_grad_value_`.
            StateError: a gradient was not written completely.
        """
        return nn.utils.clip_grad_norm_(self._parameters_to_clip("clip_grad_norm_"), max_norm, norm_type)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clip the gradients' values as torch.nn.utils.clip_grad_value_."""
        nn.utils.clip_grad_value_(self._parameters_to_clip("clip_grad_value_"), clip_value)

    def _parameters_to_clip(self, verb: str) -> Iterator[nn.Parameter]:
        self.current.check_usable()
        model = self.current.running(verb).model
        model.updates.check_clipping()
        return model.model.given.parameters()

    def snapshot(
        self,
        path: str | os.PathLike[str],
        *,
        extra: dict[str, Any] | None = None,
        keep: int | None = None,
        frozen: str = "include",
    ) -> SnapshotTicket:
        """Take a snapshot of the last step's state: a file that plain torch.load opens. Training may continue at once.

        It has "model" and "optimizer" (torch's state dicts; of several optimizers a list of them), "master" (fp32
        masters by name, if any), "registered", "extra", "rng" (if requested) and "swapper". Content on the drive is
        not copied if `path` is on the same filesystem. The file appears in the background, when it is whole: the
        ticket's `wait` and `close` wait for it.

        With ranks together each has its own file: the first `path`, and rank 1 of 2 "x.rank-1-of-2.pt" for "x.pt". A
        path that contains "rank-1", "rank_1" or "rank1" is used as it is. `ticket.path` has the name.

        Of a model that fully_shard has sharded the snapshot is a directory, which all ranks name: torch.distributed.checkpoint.load
        reads it, on any number of ranks. All ranks must call this. See docs/reference/snapshots.md.

        Args:
            path: the file, or the directory of a sharded model; must not exist. Missing directories above it are made.
            extra: values of the user in addition to `manager.extra`.
            keep: maximum number of snapshots that this run published with `keep` under names that differ from this one
                in digits only ("step-90.pt", "step-100.pt"): the oldest are deleted. Other files are never touched.
            frozen: "include", or "reference" to leave out the parameters that were frozen at `offload` (the base of a
                LoRA): state["swapper"]["left_out"] names them, and `load_state_dict(..., strict=False)` loads the rest.

        Raises:
            CheckpointError: `path` exists, its directory cannot be made, or such a file cannot contain a value.
            ConfigError: `keep` or `frozen` is unknown.
            UnsupportedError: `keep` or `frozen` with a sharded model.
            StateError: parameters are gathered, or the manager cannot be used.
            IoError: an earlier snapshot failed, which was not reported yet. Errors of this one are the ticket's.
        """
        self.current.check_usable()
        run = self.current.running("snapshot")
        target = Path(path).absolute()
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ConfigError(f"keep={keep!r} is not known: use the number of snapshots to keep, at least 1, or None")
        parse_choice(frozen, "frozen", ("include", "reference"))
        content = partial(self._user.in_snapshot, extra or {})
        asked = {Feature.KEEP: keep is not None, Feature.REFERENCE: frozen == "reference"}
        check({*run.plan.request.features, *(feature for feature, is_so in asked.items() if is_so)})
        if run.model.model.is_sharded:
            ticket = run.snapshot_directory(target, content, self._finish_snapshots)
        else:
            target = self._ranks.own_name(target)
            ticket = run.snapshot(target, content, keep, frozen == "include", self._finish_snapshots)
        if not is_off("atexit"):
            atexit.unregister(self.close)
            atexit.register(self.close)  # a program that ends without closing still publishes the snapshot
        return ticket

    def _finish_snapshots(self) -> None:
        """Start a snapshot that a thread waits for."""
        with self.current.turns.turn():
            self.current.check_usable()
            self.current.running("snapshot").committer.finish()

    def stats(self) -> StepStats:
        """Return the last step's times and bytes by phase. `print` it, or its `brief` in a progress bar.

        During the first step: those since `offload`.
        """
        return self._clock.stats()

    def on_step(self, function: Callable[[StepStats], object]) -> Callable[[], None]:
        """Call `function` with the statistics of each step from now on. Return a function that ends this.

        An exception of it does not fail the step: the log says so once. swapper.integrations.monitoring has functions for
        TensorBoard, W&B, Prometheus, transformers and Lightning.
        """
        self._clock.observers.add(function)
        return partial(self._clock.observers.remove, function)

    def __str__(self) -> str:
        return self.current.describe(self._clock.stats(), self._options.host_bytes)

    def dump(self) -> str:
        """Return a text about waits, leases, frames and transfers in flight, with ages and names.

        Raises:
            StateError: no model is offloaded.
        """
        return self.current.running("dump").describe()

    @contextmanager
    def trace(self, path: str | os.PathLike[str], max_spans: int = MAX_SPANS) -> Iterator[None]:
        """Record what happens in the context, and write it to `path`.

        Open it with https://ui.perfetto.dev or chrome://tracing, or make a page of it with `swapper report`.

        Args:
            path: the JSON file; must not exist. It is written at the end, even after an exception.
            max_spans: maximum number of recorded spans, the latest ones; 200,000 take some 50 MB.

        Raises:
            CheckpointError: `path` exists, or its directory cannot be made.
            StateError: a trace is being recorded already.
        """
        if self._counters.trace is not None:
            raise StateError(
                "this manager is being traced already, by `swapper trace` or another `trace`: take one of the two out"
            )
        target = Path(path).absolute()
        check_target(target, overwrite=None)
        about = self.current.about_trace()
        recorded = self._counters.trace = Trace(max_spans, self.current.memory_by_kind, about)
        end = self.on_step(lambda stats: about["steps"].append(stats.as_dict()))
        try:
            yield
        finally:
            end()
            self._clock.enter_again()
            self._counters.trace = None
            with replacing(path, overwrite=None, durable=False) as temporary:
                recorded.write(temporary)

    @property
    def counters(self) -> Counters:
        """Counts since the beginning."""
        if self.current.run is not None:
            self.current.run.count_bytes()
        return self._counters

    @property
    def trained(self) -> frozenset[str]:
        """Names of the parameters with optimizer state; before `offload`, those of the run to resume.

        A script that adds groups or unfreezes parameters in the middle of a run sees here if the run has them already.
        """
        if self.current.run is not None:
            return frozenset(self.current.run.plan.inventory.forms)
        return frozenset(self._resumed.state_entries["of"] if self._resumed is not None else ())

    @property
    def extra(self) -> dict[str, Any]:
        return self._user.extra

    @extra.setter
    def extra(self, values: dict[str, Any]) -> None:
        self._user.extra = values

    @property
    def step(self) -> int:
        """Number of training steps taken: `optimizer.step()` of one optimizer, or of several. See `one_step`."""
        return self._counters.step

    def close(self) -> None:
        """Write changes back, wait for snapshots, and release everything. Idempotent.

        Parameters on NVMe stay cold: to use the model without the manager, take a snapshot, or copy them in `gather`.

        Raises:
            IoError: a write failed, or a snapshot failed, which was not reported yet. Everything is released all the same.
        """
        if self.current.is_over:
            return
        with self.current.turns.turn():  # waits for another thread's forward
            self._close()

    def _close(self) -> None:
        run = self.current.run
        if self.current.is_over:
            return  # another thread was faster
        with self._recording:  # so that it includes failures
            try:
                if run is not None and not self.current.has_failed:
                    run.finish()
            finally:
                with defer_signals:
                    self.current.end()
                    atexit.unregister(self.close)
                    endings = [owner.close for owner in (run, self._earlier) if owner is not None]
                    if run is not None:
                        endings.append(self._first.remove_uncommitted)
                    close_all([*endings, self._directory.close, self._ranks.close])
        if run is not None:
            run.publisher.raise_failure()

    def __reduce__(self) -> Any:
        raise UnsupportedError(
            "a SwapManager cannot be copied or pickled: keep it outside of what is, such as a module whose weights are averaged"
        )

    def __enter__(self) -> SwapManager:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._ranks.explain(error)
        self.close()


def _close_earlier(directory: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> None:
    """In a notebook and at the prompt, close an open manager of these directories: its cell runs again."""
    each = [directory] if isinstance(directory, str | os.PathLike) else directory
    for manager in list(_managers) if is_interactive() else ():
        used = {path.parent for path in manager._directory.drives.directories}
        if not manager.current.is_over and used.intersection(Path(path).absolute() for path in each):
            manager.close()
            notify(f"closed the manager of {', '.join(map(str, used))} that was open in this process, for a new one")

"""SwapManager: the user's verbs, over a directory and the run in it.

train/session/training_session.py has what a run opens, and the order of closing.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from swapper.checkpoint.replacing import check_target, replacing
from swapper.device.device import Device
from swapper.durability.directory import RESUME_CHOICES
from swapper.durability.ranks import RANKS_CHOICES, Ranks
from swapper.durability.recovery import begin_run
from swapper.durability.ticket import SnapshotTicket
from swapper.errors import ConfigError, StateError, UnsupportedError
from swapper.io.tuning import weigh
from swapper.options import Accelerator, CommitPolicy, ExternalWeights, parse_choice, parse_host_memory
from swapper.runtime.counters import Counters
from swapper.runtime.interrupts import defer_sigint
from swapper.runtime.process import is_off
from swapper.runtime.stats import StepClock, StepStats
from swapper.runtime.trace import MOST_SPANS, Trace, asked_for
from swapper.train.session.plan import Plan
from swapper.train.session.request import ManagerOptions, OffloadOptions, Request
from swapper.train.session.session_factory import SessionFactory
from swapper.train.session.session_slot import SessionSlot
from swapper.train.session.user_state import UserState


class SwapManager:
    """Pages a model's parameters and its optimizer's state between host memory and NVMe, within one budget.

    Args:
        directory: on the drive that shall hold the run; it is made where its parent exists. The run lives in a directory of its own
            below it, `rank-R-of-W`, by the environment's RANK and WORLD_SIZE. Or a list of them, one a drive: pages are dealt to
            the drives by the speeds that `swapper tune` measured, equally where it did not.
        host_memory: every host byte that swapper may hold, in bytes or as "8GiB"; "auto" takes half of what is free.
        resume: "error" refuses a directory that holds a run; "auto" goes on from its last commit, or begins where there is
            none; "discard" throws that run away.
        ranks: "together": where torch.distributed is initialized, all its ranks make a manager each, go on from the newest step
            that all have committed, and take the same steps. "alone": each rank is a run for itself.
        commits: after how many steps the run can be gone on from, whatever kills it: a swapper.CommitPolicy(...). By default
            after each where parameters and optimizer state live on NVMe, else never.
        check_reads: compare what is read from the swap files with the checksum of what was written there, so that bytes that the
            drive, memory or another program changed are a ChecksumError and not part of a step. False saves a few percent of a step
            that computing alone fills.
        rng: commits and snapshots hold the states of the random number generators (Python's, torch's, NumPy's) as of the
            end of their step, and a run that goes on puts them back in `offload`.
        backend: how transfers are made: "auto", "uring" or "threads".
        cold: what becomes of an operation on a parameter that is away, outside of a forward that contains it: with "read" it is
            done, in place or not, the parameter being in memory for that one operation; with "raise" it is a ColdParameterError.
        stall_s: when one wait for the drive takes longer than so many seconds, the log gets a dump of what is going on, as from
            `dump`; None: never. SIGUSR1 asks for one too, where nobody else has a handler for it (runtime/watchdog.py).

    Attributes:
        extra: a dict of the user's own values that belong to a step (an epoch, a position in the data): in every commit and
            snapshot, and there again in a run that goes on. As of the next use after the step, so set it where schedulers step.
        current: the run that there is; for swapper's other parts.

    Raises:
        ConfigError: an option is not known.
        DirectoryError: the directory's parent is missing; the directory is not writable, in use, or holds a run; or ranks hold
            what does not fit together.
        CheckpointError: the last commit of the run to go on from cannot be read.
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
        host_bytes = parse_host_memory(host_memory)
        parse_choice(resume, "resume", RESUME_CHOICES)
        commits = CommitPolicy() if commits is None else commits
        if not isinstance(commits, CommitPolicy):
            raise ConfigError(f"commits={commits!r} is not known: say commits=swapper.CommitPolicy(every=...)")
        parse_choice(backend, "backend", ("auto", "uring", "threads"))
        parse_choice(cold, "cold", ("read", "raise"))
        parse_choice(ranks, "ranks", RANKS_CHOICES)
        if stall_s is not None and not stall_s > 0:
            raise ConfigError(f"stall_s={stall_s!r} is not a time: use seconds, more than 0, or None")
        self._recording = ExitStack()  # of the trace that the environment asks for
        self._clock = StepClock(Counters())
        self._counters = self._clock.counters
        self._ranks = Ranks.find(ranks)
        self._directory, self._resumed, fallback = begin_run(directory, resume, self._ranks, weigh)
        self._counters.step = self._resumed.step if self._resumed is not None else 0
        self._user = UserState(rng, self._resumed)
        self._options = ManagerOptions(
            host_bytes=host_bytes, commit_every=commits.every if commits.crash_resume else None, fsync=commits.fsync,
            drives=self._directory.drives, backend=backend, check_reads=check_reads, operates=cold == "read", stall_s=stall_s,
        )  # fmt: skip
        self.current = SessionSlot(self._directory, backend, self._clock, self._user)
        self._factory = SessionFactory(self.current, self._directory, self._clock, self._user, self._resumed, fallback)
        self._factory.remove_strays()

    # --- the user's verbs -----------------------------------------------------------------------------------------

    def offload(
        self,
        model: nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module],
        optimizer: Optimizer | None = None,
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
        init: Callable[[nn.Module], Any] | str | os.PathLike[str] | None = None,
    ) -> tuple[Any, Any]:
        """Move `model`'s parameters and `optimizer`'s state to where they shall live. Call it once.

        Args:
            model: on the CPU, with values, or on the meta device, with `init`; hooks are put into it. Several that are used
                together (a policy and a reward model, a copy that follows by averaging) in a dictionary by name or in a list:
                they share the budget.
            optimizer: over parameters of `model`. It is not used any more; the returned one takes its place. None where nothing
                is trained.
            plan: what `manager.plan` has returned for these: it is done as planned. It says all that follows but `init`, so leave
                that out.
            params, optimizer_state: "host", "nvme", or "auto" (in memory as far as the budget goes). `params` may be "device":
                see `device_memory`. For a model that is on a device and updated there, so may `optimizer_state`: all of it stays
                there and is never streamed, and with "auto" that of as many groups as `device_memory` has room for when all
                parameters and gradients stay. Its place on NVMe, or in host memory, has it at commits and snapshots.
            gradients: "host" or "auto" keeps them in host memory. With "nvme" they leave as they come; `parameter.grad` then
                says that there is one, but has no data to look at: clipping, scaling and zeroing it work. "device", for a model
                that is on a device and updated there, keeps all of them there, as ordinary tensors, and "auto" then those of as
                many groups as `device_memory` has room for where all parameters stay.
            master_weights: None does exactly what plain torch would do; torch.float32 keeps fp32 masters and fp32
                optimizer state beside bf16 and fp16 parameters.
            update: "step" updates all parameters in `optimizer.step()`. With "deferred" that call only fixes what the step is;
                each group is updated when the next forward reaches it and its parameters are used at once, so that they are read
                once less. The results are the same. What looks at parameters, state or gradients earlier finishes the step.
                "backward" updates each group as soon as backward has done with it; see docs/training.md for what that rules out.
            device: where forwards and backwards run: "cpu", "cuda", "cuda:1", ... Inputs are to be there; the model may be.
                `parameter.grad` has no data to look at then, unless gradients stay there.
            device_memory: bytes, or "8GiB", of parameters on the device at one time; "auto" is half of what is free there. What it
                can hold stays from forward to backward; params="device" refuses a budget that cannot hold all of them.
            accelerator: how a model on a device is updated: a swapper.Accelerator(...). By default on the CPU, by your optimizer.
            external: files of yours that have the frozen parameters, which are read in place: a swapper.ExternalWeights(path=...).
                By default all parameters are copied to the run's directory.
            init: where the values of a model on the meta device come from: a function that fills the parameters and buffers of the
                module that it is given, or the path of a checkpoint (safetensors, Hugging Face directory, torch, DCP). They are
                made group by group at their places: the model is never whole in memory. A run that goes on has them already.

        Returns:
            `model`, the same object, and an optimizer that shares `optimizer.param_groups` (None for None).

        Raises:
            ConfigError: an option is not known, or they do not go together.
            BudgetError: the budget is too small; says the smallest that works.
            UnsupportedError: this model or optimizer cannot be offloaded exactly.
            DirectoryError: the drive has not enough room.
            CheckpointError: the run to go on from is another one; what `init` or `external` names is no checkpoint, or damaged;
                `external` does not fit the model.
            DeviceError: there is no such device, or it fails.
            IoError: a transfer failed.
            StateError: the manager is closed or has a model already, or the model has another manager; `plan` is of something
                else, or of how it was.
        """
        self.current.check()
        self._ranks.check_still_so()
        if self.current.run is not None:
            raise StateError(
                "this manager has a model already: give several at once, offload({'policy': a, 'reference': b}, optimizer), or "
                "make one manager for each"
            )
        options = OffloadOptions(
            params=params, optimizer_state=optimizer_state, gradients=gradients, master_weights=master_weights, update=update,
            device=device, device_memory=device_memory, accelerator=accelerator, external=external,
        )  # fmt: skip
        if plan is not None:
            if not isinstance(plan, Plan):
                raise ConfigError(
                    f"plan={plan!r} is not known: give what manager.plan returns, or keywords as params='nvme'"
                )
            options.check_none_given()
            plan.request.check_is_for(model, optimizer, self._options)

        def make() -> Plan:
            request = Request.of(model, optimizer, options, self._options) if plan is None else plan.request
            return self._factory.plan(request, init is not None, plan)

        try:
            paged = self._factory.open(make, init)
            if (path := asked_for(self._ranks.rank)) is not None:
                self._recording.enter_context(self.trace(path))
            return model, None if optimizer is None else paged
        except BaseException:
            self._factory.give_up()
            raise

    def plan(
        self,
        model: nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module],
        optimizer: Optimizer | None = None,
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
    ) -> Plan:
        """Return what `offload` will do: placement, memory, space, bytes a step, wear. Nothing is changed. `print` it.

        Give it to `offload` to have just that, or give `offload` the same keywords. A run that is gone on from stays as it was
        divided.

        Args: as of `offload`; parameters may be on the meta device.

        Raises: as `offload` does, but for what only files, drives and `init` can tell.
        """
        self.current.check_usable()
        options = OffloadOptions(
            params=params, optimizer_state=optimizer_state, gradients=gradients, master_weights=master_weights, update=update,
            device=device, device_memory=device_memory, accelerator=accelerator, external=external,
        )  # fmt: skip
        return self._factory.plan(Request.of(model, optimizer, options, self._options), may_be_meta=True)

    def register(self, **objects: Any) -> None:
        """Name objects with `state_dict`/`load_state_dict` that belong to a step (a scheduler, a sampler).

        Commits and snapshots hold their state; in a run that goes on they get here what its last commit has.

        Raises:
            ConfigError: an object has not both, or its state cannot be kept in a file that torch.load(weights_only=True) reads.
        """
        self._user.register(objects)

    @contextmanager
    def gather(self, target: nn.Module | nn.Parameter | Iterable[nn.Parameter], write: bool = False) -> Iterator[Any]:
        """Have parameters in memory for the time of the context; on the device, where the model runs on one.

        Args:
            target: a module (with all below it), a parameter, or several. The context gives it back, as `as`.
            write: say True to change them; fp32 masters follow where the new value is another one.

        Raises:
            BudgetError: they do not fit into the pool, or on the device, at one time.
            IoError: they could not be read.
            StateError: parameters were changed without `write=True`, or are not of the offloaded model; or backward has updated
                some of them and `optimizer.step()` is still to come.
        """
        with self.current.turns.turn():
            self.current.check()
            run = self.current.running("gather")
            run.model.finish_update()
        if isinstance(target, nn.Module):
            parameters = list(target.parameters())
        elif isinstance(target, nn.Parameter):
            parameters = [target]
        else:
            parameters = list(target)
        if write:
            self.current.check_to_write()
        with run.model.gathering.gather(run.model.paged(parameters), write):
            yield target

    def accumulate(self) -> AbstractContextManager[None]:
        """Return a context for the backwards that are not the last ones of their step, as DDP's no_sync.

        Needed with `update="backward"`, where a backward outside of it is taken for the last one and updates; else it does nothing.
        """
        return self.current.running("accumulate").model.updates.accumulating()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients' norm as torch.nn.utils.clip_grad_norm_ does; returns the norm before clipping, a tensor of shape ().

        Raises:
            UnsupportedError: with `update="backward"`, which has used gradients by then. So does `clip_grad_value_`.
            StateError: a gradient did not reach its pages whole.
        """
        self.current.check()
        model = self.current.running("clip_grad_norm_").model
        model.updates.check_clipping()
        return model.gradients.clip_norm(model.given_parameters(), max_norm, norm_type)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clip the gradients' values as torch.nn.utils.clip_grad_value_ does."""
        self.current.check()
        model = self.current.running("clip_grad_value_").model
        model.updates.check_clipping()
        model.gradients.clip_value(model.given_parameters(), clip_value)

    def snapshot(
        self,
        path: str | os.PathLike[str],
        *,
        extra: dict[str, Any] | None = None,
        keep: int | None = None,
        frozen: str = "include",
    ) -> SnapshotTicket:
        """Take a snapshot of the whole state as of the last step: a file that plain torch.load opens. Training may go on at once.

        The file has "model" and "optimizer" (state dicts as torch makes them), "master" (fp32 masters by name, where there
        are any), "registered", "extra", "rng" (where that was asked for) and "swapper". What of it is on the drive is not
        copied where `path` is on the same filesystem. It appears when it is whole, in the background: the ticket's `wait`
        waits for it, and so does `close`.

        Of ranks that are together each has one of its own: the first has `path`, and rank 1 of 2 "x.rank-1-of-2.pt" for "x.pt". A
        path that has "rank-1", "rank_1" or "rank1" in it already is taken as it is. `ticket.path` says it.

        Of a model that fully_shard has sharded the snapshot is a directory, which all ranks name: torch.distributed.checkpoint.load
        reads it, on any number of ranks. All ranks must call this. See docs/snapshots.md.

        Args:
            path: the file, or the directory of a sharded model; must not exist. The directory that it is in must.
            extra: values of the user's own, beside those of `manager.extra`.
            keep: remove the oldest snapshots that this run published with `keep` under names like this one, different in
                digits only ("step-90.pt", "step-100.pt"), until so many are left. Other files are never touched.
            frozen: "include", or "reference" to leave out the parameters that were frozen when they were offloaded (the
                base of a LoRA): state["swapper"]["left_out"] names them, and `load_state_dict(..., strict=False)` loads
                the rest over them.

        Raises:
            CheckpointError: `path` exists, its directory does not, or something cannot be kept in such a file.
            ConfigError: `keep` or `frozen` is not known.
            UnsupportedError: `keep` or `frozen` with a sharded model.
            StateError: parameters are gathered, or the manager cannot be used.
            IoError: an earlier snapshot failed and nobody was told yet. What goes wrong with this one is the ticket's error.
        """
        self.current.check()
        run = self.current.running("snapshot")
        target = Path(path).absolute()
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ConfigError(f"keep={keep!r} is not known: use the number of snapshots to keep, at least 1, or None")
        parse_choice(frozen, "frozen", ("include", "reference"))
        content = partial(self._user.in_snapshot, extra or {})
        if run.is_sharded:
            if keep is not None or frozen != "include":
                raise UnsupportedError("keep= and frozen= do not go with a sharded model's snapshot: leave them out")
            ticket = run.snapshot_directory(target, content, self._finish_snapshots)
        else:
            target = self._ranks.own_name(target)
            ticket = run.snapshot(target, content, keep, frozen == "include", self._finish_snapshots)
        if not is_off("atexit"):
            atexit.unregister(self.close)
            atexit.register(self.close)  # where a program ends without closing, the snapshot still gets its name
        return ticket

    def _finish_snapshots(self) -> None:
        """A snapshot is waited for: have it started."""
        with self.current.turns.turn():
            self.current.check_usable()
            self.current.running("snapshot").committer.finish()

    def stats(self) -> StepStats:
        """Return where the time of the last step went and what it moved, by phase. `print` it; its `brief` is for a progress bar.

        Before the first step is over: what happened since `offload`.
        """
        return self._clock.stats()

    def dump(self) -> str:
        """Return what is going on, for a person: who waits, leases, frames and transfers in flight, with ages and names.

        Raises:
            StateError: no model is offloaded.
        """
        return self.current.running("dump").describe()

    @contextmanager
    def trace(self, path: str | os.PathLike[str], most_spans: int = MOST_SPANS) -> Iterator[None]:
        """Record what happens in the context, and write it to `path`: open it with https://ui.perfetto.dev or chrome://tracing.

        Phases, waits, updates, leases, and each transfer from its submission to its end.

        Args:
            path: the JSON file; must not exist. It appears at the end, also where the context is left by an exception.
            most_spans: how many spans of time are kept, the latest ones; 200,000 take some 50 MB.

        Raises:
            CheckpointError: `path` exists, or its directory does not.
            StateError: somebody records already.
        """
        if self._counters.trace is not None:
            raise StateError("this manager is being traced already: one trace at a time")
        target = Path(path).absolute()
        check_target(target, overwrite=None)
        recorded = self._counters.trace = Trace(most_spans)
        try:
            yield
        finally:
            self._clock.enter_again()
            self._counters.trace = None
            with replacing(path, overwrite=None, durable=False) as temporary:
                recorded.write(temporary)

    @property
    def counters(self) -> Counters:
        """What was done so far, in numbers that only grow."""
        if self.current.run is not None:
            self.current.run.count_bytes()
        return self._counters

    @property
    def trained(self) -> frozenset[str]:
        """Names of the parameters that the run has optimizer state for; before `offload`, of the run that is gone on from.

        Where a script adds groups or unfreezes parameters in the middle of a run, this says whether the run has them already.
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
        """How many optimizer steps were taken."""
        return self._counters.step

    def close(self) -> None:
        """Write back what is changed, wait for snapshots, and let everything go. Idempotent.

        Parameters that live on NVMe stay away: take a snapshot first, or copy them within `gather`, to use the model without
        the manager.

        Raises:
            IoError: something could not be written, or a snapshot failed and nobody was told yet. All is let go nevertheless.
        """
        if self.current.is_over:
            return
        with self.current.turns.turn():  # a forward that another thread runs is waited for
            self._close()

    def _close(self) -> None:
        run = self.current.run
        if self.current.is_over:
            return  # another thread was faster
        with self._recording:  # what fails is in it too
            try:
                if run is not None and not self.current.has_failed:
                    run.finish()
            finally:
                with defer_sigint:
                    self.current.end()
                    atexit.unregister(self.close)
                    self._factory.forget()
                    if run is not None:
                        run.close()
                    self._directory.close()
                    self._ranks.close()
        if run is not None:
            run.publisher.raise_failure()

    def __enter__(self) -> SwapManager:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._ranks.explain(error)
        self.close()

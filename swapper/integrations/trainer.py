"""Makes a Trainer of transformers, or one derived from it (TRL's), train an offloaded model: `offloaded`.

The Trainer builds its optimizer as always, from its TrainingArguments (`optim`, learning rate, groups with and without
weight decay), and its schedule. The mixin gives model and optimizer to a manager between its construction and its
training, and continues a resumed run at its step.

    trainer = offloaded(Trainer, "run")(model=model, args=args, train_dataset=data)
"""

from __future__ import annotations

import atexit
import copy
import dataclasses
import json
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from swapper.device.device import OUT_OF_MEMORY
from swapper.errors import ConfigError, StateError, UnsupportedError
from swapper.manager import SwapManager
from swapper.options import check_at_once
from swapper.runtime.process import is_off, rng_states, set_rng_states
from swapper.runtime.records import parse_json
from swapper.train.optimizer.optimizer_set import has_modes
from swapper.train.state.optim import packed_groups, restore_settings

TIMES_AGAIN = 3
"""That a micro-batch without memory is run again: each gives up a quarter of device_memory."""
STATE_FILE, SCALER_FILE = "trainer_state.json", "scaler.pt"
"""A Trainer reads its step and its loss scale from these files of a checkpoint (transformers.trainer: TRAINER_STATE_NAME,
SCALER_NAME)."""


def offloaded(
    trainer_class: type, manager: SwapManager | str | os.PathLike[str], *, at_once: int | None = 1, **options: Any
) -> Any:
    """Return a class to use in place of `trainer_class`: it trains the model that it is given paged by `manager`.

            trainer = offloaded(SFTTrainer, "run", params="nvme", optimizer_state="nvme")(model=model, args=args)

    Args:
        trainer_class: transformers' Trainer, or a class derived from it.
        manager: a SwapManager; or the directory of a run, for SwapManager(directory, resume="auto", rng=True).
        at_once: micro-batches of a step (`gradient_accumulation_steps`) that pass through each layer for one read of it,
            as in `manager.accumulate_batches`. 1: one after the other. None: all.
        options: of `manager.offload`, with `init` for a model of `for_training`. The default of `device` is the
            Trainer's.

    Raises:
        ConfigError: `trainer_class` is no Trainer.
    """
    if not isinstance(trainer_class, type) or not hasattr(trainer_class, "create_optimizer"):
        raise ConfigError(f"offloaded({trainer_class!r}, ...): give transformers' Trainer, or a class derived from it")
    chosen = {
        "swapper_run": manager,
        "swapper_at_once": at_once,
        "swapper_options": options,
        "__doc__": trainer_class.__doc__,
    }
    return type(f"Offloaded{trainer_class.__name__}", (OffloadTrainerMixin, trainer_class), chosen)


class OffloadTrainerMixin:
    """Trains a Trainer's model paged by a SwapManager. `offloaded` puts it before a Trainer's class; so may a class of yours.

            class MyTrainer(OffloadTrainerMixin, Trainer):
                swapper_run, swapper_options = "run", {"params": "nvme"}

    Attributes:
        swapper_run, swapper_at_once, swapper_options: as `manager`, `at_once` and `options` of `offloaded`.
        manager: the SwapManager. Close it after the last use of the model: parameters on NVMe are cold then.

    Raises:
        As SwapManager and `manager.offload`.
        UnsupportedError: `model_init`, DeepSpeed, FSDP or DataParallel by the Trainer, `fp16_full_eval`, `bf16_full_eval`;
            with `at_once`: several processes, a Trainer that counts its micro-batches (GRPO's), `activation_offloading`.
    """

    swapper_run: SwapManager | str | os.PathLike[str]
    swapper_at_once: int | None = 1
    swapper_options: Mapping[str, object] = {}
    manager: SwapManager
    _place: _TrainerPosition

    def __init__(self, *arguments: object, **others: object) -> None:
        self._is_offloaded = False
        self._batches: list[object] = []  # micro-batches of the step that are left
        self._is_first = False  # of them, the one to come
        self._losses: list[object] = []  # of its micro-batches that have run, and that the Trainer has not asked for
        super().__init__(*arguments, **others)
        trainer: Any = self  # mypy does not know the class that this is mixed into
        _check(trainer)
        if self.swapper_at_once != 1:
            _check_runs_together(trainer)
        options = {"device": trainer.args.device, **self.swapper_options}
        run = self.swapper_run
        self.manager = run if isinstance(run, SwapManager) else SwapManager(run, resume="auto", rng=True)
        try:
            optimizer = trainer.create_optimizer()
            if has_modes(optimizer):
                optimizer.train()  # as the Trainer calls it before each step
            _, trainer.optimizer = self.manager.offload(trainer.model, optimizer, **options)
        except BaseException:
            if self.manager is not run:
                self.manager.close()
            raise
        self._place = _TrainerPosition(trainer)
        self.manager.register(trainer=self._place)
        self._is_offloaded = True
        if self.manager is not run:
            _close_at_exit(self.manager)

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: object, **others: object) -> object:
        """Train as the Trainer does. A resumed run continues at its step, unless `resume_from_checkpoint` is given.

        Args:
            resume_from_checkpoint, arguments, others: as of the Trainer's `train`.

        Raises: as the Trainer does, and as training with a SwapManager.
        """
        begin: Any = super().train  # type: ignore[misc]
        place = self._place
        place.calls += 1
        if (
            resume_from_checkpoint or place.found is None or not self.manager.step
        ):  # of no step there is nothing to continue
            place.found = None
            return begin(resume_from_checkpoint, *arguments, **others)
        with TemporaryDirectory(prefix="swapper-trainer-") as folder:
            place.write(folder)
            try:
                return begin(folder, *arguments, **others)
            finally:
                place.found = None  # a second train() starts over, as a Trainer's

    def get_batch_samples(self, *arguments: object, **others: object) -> object:
        """Collect the micro-batches of a step as the Trainer does, for `training_step`."""
        self._place.begin_step()
        collected = super().get_batch_samples(*arguments, **others)  # type: ignore[misc]
        self._batches, self._losses = list(collected[0]), []
        self._is_first = True
        return collected

    def training_step(self, model: object, inputs: object, num_items_in_batch: object = None) -> object:
        """Run a micro-batch, or the whole step at its first one, and return the loss.

        Args:
            model, inputs, num_items_in_batch: as of the Trainer's `training_step`.

        Raises: as the Trainer does, and as training with a SwapManager.
        """
        step = partial(super().training_step, model, num_items_in_batch=num_items_in_batch)  # type: ignore[misc]
        if len(self._batches) > 1 and self.swapper_at_once != 1:
            batches, self._batches = self._batches, []
            self._losses = self._run_together(step, batches)
        if self._losses:
            return self._losses.pop(0)
        self._batches = self._batches[1:]
        with self.manager.accumulate() if self._batches else nullcontext():
            return self._run(step, inputs)

    def _run(self, step: Callable[[object], object], inputs: object) -> object:
        """Run a micro-batch. The first one of a step is run again, as if it had not begun, where it found no memory on a device.

        swapper uses less of that each time (train/groups/memory_use.py). Later ones have gradients to add to, which a backward
        that failed has changed.
        """
        trainer: Any = self
        is_first, self._is_first = self._is_first, False
        versions = [(buffer, buffer._version) for buffer in trainer.model.buffers()]
        for _ in range(
            TIMES_AGAIN if is_first and self.manager.current.running("train").placed.processor.is_device else 0
        ):
            state = rng_states()
            try:
                return step(inputs)
            except OUT_OF_MEMORY:
                if any(buffer._version != version for buffer, version in versions):
                    raise  # a forward's average, say, which the next one would change again
            trainer.model.zero_grad()
            set_rng_states(state)
        return step(inputs)

    def _run_together(self, step: Callable[[object], object], batches: list[object]) -> list[object]:
        """Run the Trainer's own step of all micro-batches, whose backwards wait for each other. Return their losses."""
        trainer: Any = self
        accelerator = trainer.accelerator
        scale = accelerator.backward  # accelerate's, or one that the user has set
        own = vars(accelerator).get("backward")
        losses: dict[int, object] = {}

        def backward(loss: torch.Tensor, **options: object) -> None:
            scale(loss.as_subclass(_AwaitedLoss), **options)

        def loss_of(numbered: tuple[int, Any]) -> Any:
            number, batch = numbered
            awaited: list[torch.Tensor] = []
            _AwaitedLoss.of_thread.losses = awaited
            try:
                losses[number] = step(batch)
            finally:
                del _AwaitedLoss.of_thread.losses
            if len(awaited) != 1:
                raise UnsupportedError(
                    f"a micro-batch has called accelerator.backward {len(awaited)} times, and once goes with "
                    f"at_once={self.swapper_at_once}: leave at_once= out"
                )
            return awaited.pop()

        trainer.model.train()  # as each step does: here while no micro-batch is in the middle
        accelerator.backward = backward  # an instance's attribute, before that of its class
        try:
            self.manager.accumulate_batches(loss_of, enumerate(batches), at_once=self.swapper_at_once)
        finally:
            if own is None:
                del accelerator.backward
            else:
                accelerator.backward = own
        return [losses[number] for number in range(len(batches))]

    # --- what a Trainer does with a model and a checkpoint, if swapper has done it ------------------------------------

    def _move_model_to_device(self, model: object, device: object) -> None:
        if self._is_offloaded:
            super()._move_model_to_device(model, device)  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *others: object, **more: object) -> None:
        if not self._is_place(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, *others, **more)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._is_place(checkpoint):
            self._place.set_schedule()
        else:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._is_place(checkpoint):
            set_rng_states(self._place.rng)
        else:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]

    def _maybe_log_save_evaluate(self, *arguments: object, **others: object) -> None:
        super()._maybe_log_save_evaluate(*arguments, **others)  # type: ignore[misc]
        self.manager.current.user.note_rng()  # of an evaluation, which the next step begins after

    def _run_epoch(self, *arguments: object, **others: object) -> None:
        trainer: Any = self
        is_over = trainer.state.global_step >= trainer.state.max_steps
        if is_over and self._place.found is not None:  # a Trainer would take one more step
            trainer.control.should_training_stop = True
        else:
            super()._run_epoch(*arguments, **others)  # type: ignore[misc]

    def _is_place(self, checkpoint: str | None) -> bool:
        return self._is_offloaded and self._place.folder is not None and checkpoint == self._place.folder


class _AwaitedLoss(torch.Tensor):
    """A micro-batch's loss, and what is computed of it, as scaled by accelerate: `backward` keeps it for the caller to run.

    Attributes:
        of_thread: `losses` has what was kept; each micro-batch has a thread.
    """

    of_thread = threading.local()

    def backward(self, *arguments: object, **options: object) -> None:
        """Keep this loss.

        Raises:
            UnsupportedError: it is given options of torch's `backward`.
        """
        if arguments or options:
            raise UnsupportedError(
                f"loss.backward({', '.join([*map(repr, arguments), *(f'{name}=' for name in options)])}) does not go with "
                "at_once=: leave at_once= out"
            )
        self.of_thread.losses.append(self.as_subclass(torch.Tensor))


def _close_at_exit(manager: SwapManager) -> None:
    """Have a manager that is still there closed when the program ends, so that its last step is committed."""
    found = weakref.ref(manager)
    if not is_off("atexit"):
        atexit.register(lambda: None if (still := found()) is None else still.close())


def _check(trainer: Any) -> None:
    """Raise UnsupportedError if TrainingArguments do to the model or its optimizer what an offloaded one does not stand."""
    args = trainer.args
    engine = "makes an engine of its own for parameters that swapper would page: leave it out, or call fully_shard and "
    engine += "manager.offload in a loop of your own (docs/guides/ranks.md)"
    late = "would convert the model at the first evaluation: leave it out, or load the model with that dtype="
    refused = {
        "model_init": (trainer.model_init, "makes a new model in each train(): give an offloaded Trainer model="),
        "deepspeed": (trainer.is_deepspeed_enabled, engine),
        "fsdp": (args.fsdp or trainer.is_fsdp_enabled, engine),
        "parallelism_config": (getattr(args, "parallelism_config", None), engine),
        "fp16_full_eval": (args.fp16_full_eval, late),
        "bf16_full_eval": (args.bf16_full_eval, late),
    }
    for name, (is_asked, reason) in refused.items():
        if is_asked:
            raise UnsupportedError(f"{name}= {reason}")
    if args.n_gpu > 1:
        raise UnsupportedError(
            f"the Trainer would copy the model to {args.n_gpu} GPUs by DataParallel: start the script with torchrun, a process "
            "for each, or show it one by CUDA_VISIBLE_DEVICES"
        )


def _check_runs_together(trainer: Any) -> None:
    """Raise UnsupportedError if micro-batches of this Trainer cannot be in the middle together."""
    from transformers import Trainer

    check_at_once(trainer.swapper_at_once)
    if trainer.args.world_size > 1:
        raise UnsupportedError(
            f"at_once={trainer.swapper_at_once} does not go with several processes: DistributedDataParallel averages gradients in "
            "the backward of the last micro-batch alone, which has to follow the others: leave at_once= out"
        )
    preparing = next(kind for kind in type(trainer).__mro__ if "_prepare_inputs" in vars(kind))
    if preparing is not Trainer:
        raise UnsupportedError(
            f"at_once={trainer.swapper_at_once} does not go with {preparing.__name__}, which prepares the inputs of its "
            "micro-batches in its own way, maybe by counting them: leave at_once= out"
        )
    if getattr(trainer.args, "activation_offloading", False):
        raise UnsupportedError(
            f"at_once={trainer.swapper_at_once} does not go with activation_offloading=True, which is for one micro-batch: leave "
            "one of them out"
        )


class _TrainerPosition:
    """The Trainer's place in its training: registered with the manager, so that each commit has it.

    Attributes:
        found: the state of the commit that the run is resumed from, until it is used.
        folder: contains this state in the Trainer's own form.
        rng: states of the random number generators that a resumed run begins with.
        steps_before: steps of the manager before the first that the Trainer counts: of another train(), or of a Trainer's
            checkpoint that was gone back to. Less those that the Trainer alone counts, which its loss scaler skipped.
        calls: of train() so far.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.found: dict[str, Any] | None = None
        self.folder: str | None = None
        self.rng = rng_states()  # offload has just restored them, as the optimizer's settings
        self._settings = copy.deepcopy(packed_groups(trainer.optimizer.param_groups))
        self.steps_before = self.calls = 0
        self._scheduled: int | None = None  # steps of the schedule at the beginning of this one

    def begin_step(self) -> None:
        """Note where the step begins."""
        self.steps_before = self._trainer.manager.step - self._trainer.state.global_step
        self._scheduled = getattr(self._trainer.lr_scheduler, "_step_count", None)

    def state_dict(self) -> dict[str, object]:
        """Return the Trainer's state without its history, and the schedule's. With its callbacks, if it is to restore them.

        It is read after the schedule has stepped, maybe before the Trainer counts: the manager's steps count.
        """
        schedule, state = self._trainer.lr_scheduler, dataclasses.asdict(self._trainer.state)
        step, scaler = self._trainer.manager.step, self._trainer.accelerator.scaler
        if step - self.steps_before > self._trainer.state.global_step:
            state["epoch"] = self._epoch_after(step - self.steps_before)
        del state["log_history"], state["stateful_callbacks"]
        if self._restores_callbacks:
            state["stateful_callbacks"] = self._callback_states()
        return {
            "state": json.dumps(state, default=float),
            "step": step - self.steps_before,
            "step_of_run": step,
            "call": self.calls,
            "schedule": None if schedule is None else schedule.state_dict(),
            "schedule_is_behind": self._schedule_is_behind(step),
            "scaler": None if scaler is None else scaler.state_dict(),
        }

    def _epoch_after(self, steps: int) -> float:
        """Return a Trainer's `epoch` after these steps; the present one if its loader has no length."""
        together = self._trainer.args.gradient_accumulation_steps
        try:
            batches = len(self._trainer.callback_handler.train_dataloader)
        except TypeError:
            return float(self._trainer.state.epoch)
        epochs, left = divmod(steps, -(-batches // together))
        return float(epochs + min(left * together, batches) / batches)

    def _schedule_is_behind(self, step: int) -> bool:
        """Return whether the Trainer was interrupted between the optimizer's step and the schedule's."""
        is_counted = step - self.steps_before <= self._trainer.state.global_step
        if is_counted or self._scheduled is None or isinstance(self._trainer.lr_scheduler, ReduceLROnPlateau):
            return False
        return bool(self._trainer.lr_scheduler._step_count == self._scheduled)

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.found = state

    def write(self, folder: str) -> None:
        """Write a checkpoint of the Trainer's place alone.

        Raises:
            StateError: the manager has taken steps of which the Trainer does not know, or the run was stopped in a later
                train().
        """
        found = self.found
        if found is None or self._trainer.manager.step != found["step_of_run"]:
            raise StateError("the run has taken steps outside of this Trainer: make the Trainer before them")
        if found["call"] > 1:
            raise StateError(
                f"the run was stopped in call {found['call']} of its Trainer's train(), and only the first can be continued: go "
                "on from a checkpoint of the Trainer (resume_from_checkpoint=), or give each train() a run of its own"
            )
        state = {**parse_json(found["state"].encode(), finite=False), "global_step": found["step"], "log_history": []}
        if not self._restores_callbacks or "stateful_callbacks" not in state:
            state["stateful_callbacks"] = self._callback_states()
        Path(folder, STATE_FILE).write_text(json.dumps(state))
        if found["scaler"] is not None and self._trainer.accelerator.scaler is not None:
            torch.save(found["scaler"], Path(folder, SCALER_FILE))
        self.folder = folder

    @property
    def _restores_callbacks(self) -> bool:
        return bool(getattr(self._trainer.args, "restore_callback_states_from_checkpoint", False))

    def _callback_states(self) -> dict[str, object]:
        """Return the states of the Trainer's callbacks as they are now: its next checkpoint asks for each."""
        from transformers.trainer_callback import ExportableState, TrainerState

        callbacks = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        exported: Any = [callback for callback in callbacks if isinstance(callback, ExportableState)]
        states: Any = TrainerState(stateful_callbacks=exported).stateful_callbacks
        return dict(states)

    def set_schedule(self) -> None:
        """Set the Trainer's new schedule, and the settings (rates, momenta) that it has changed, to the commit's."""
        if self.found is None or self.found["schedule"] is None:
            return
        self._trainer.lr_scheduler.load_state_dict(self.found["schedule"])
        restore_settings(self._trainer.optimizer.param_groups, self._settings)
        if self.found.get("schedule_is_behind"):
            self._trainer.lr_scheduler.step()

"""Makes a Trainer of transformers, or one derived from it (TRL's), train an offloaded model: `offloaded`.

The Trainer builds its optimizer as always, from its TrainingArguments (`optim`, learning rate, groups with and without
weight decay), and its schedule. The mixin gives model and optimizer to a manager between its construction and its
training, and continues a resumed run at its step.

    trainer = offloaded(Trainer, "run")(model=model, args=args, train_dataset=data)
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from swapper.errors import ConfigError, StateError, UnsupportedError
from swapper.manager import SwapManager
from swapper.runtime.process import is_off
from swapper.train.session.user_state import rng_states, set_rng_states

STATE_FILE = "trainer_state.json"
"""A Trainer reads its step from this file of a checkpoint (transformers.trainer.TRAINER_STATE_NAME)."""


def offloaded(trainer_class: type, manager: SwapManager | str | os.PathLike[str], **options: Any) -> Any:
    """Return a class to use in place of `trainer_class`: it trains the model that it is given paged by `manager`.

            trainer = offloaded(SFTTrainer, "run", params="nvme", optimizer_state="nvme")(model=model, args=args)

    Args:
        trainer_class: transformers' Trainer, or a class derived from it.
        manager: a SwapManager; or the directory of a run, for SwapManager(directory, resume="auto", rng=True).
        options: of `manager.offload`, with `init` for a model of `for_training`. The default of `device` is the
            Trainer's.

    Raises:
        ConfigError: `trainer_class` is no Trainer.
    """
    if not isinstance(trainer_class, type) or not hasattr(trainer_class, "create_optimizer"):
        raise ConfigError(f"offloaded({trainer_class!r}, ...): give transformers' Trainer, or a class derived from it")
    chosen = {"swapper_run": manager, "swapper_options": options, "__doc__": trainer_class.__doc__}
    return type(f"Offloaded{trainer_class.__name__}", (OffloadTrainerMixin, trainer_class), chosen)


class OffloadTrainerMixin:
    """Trains a Trainer's model paged by a SwapManager. `offloaded` puts it before a Trainer's class; so may a class of yours.

            class MyTrainer(OffloadTrainerMixin, Trainer):
                swapper_run, swapper_options = "run", {"params": "nvme"}

    Attributes:
        swapper_run, swapper_options: as `manager` and `options` of `offloaded`.
        manager: the SwapManager. Close it after the last use of the model: parameters on NVMe are cold then.

    Raises:
        As SwapManager and `manager.offload`.
        UnsupportedError: `model_init`, DeepSpeed, or FSDP by the Trainer.
    """

    swapper_run: SwapManager | str | os.PathLike[str]
    swapper_options: Mapping[str, Any] = {}
    manager: SwapManager

    def __init__(self, *arguments: Any, **others: Any) -> None:
        self._is_offloaded = False
        self._place: _Place | None = None
        super().__init__(*arguments, **others)
        trainer: Any = self  # mypy does not know the class that this is mixed into
        _check(trainer)
        options = {"device": trainer.args.device, **self.swapper_options}
        run = self.swapper_run
        self.manager = run if isinstance(run, SwapManager) else _open(run)
        _, trainer.optimizer = self.manager.offload(trainer.model, trainer.create_optimizer(), **options)
        self._is_offloaded = True
        self._place = _Place(trainer)
        self.manager.register(trainer=self._place)

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **others: Any) -> Any:
        """Train as the Trainer does. A resumed run continues at its step, unless `resume_from_checkpoint` is given."""
        begin: Any = super().train  # type: ignore[misc]
        if resume_from_checkpoint or self._place is None or self._place.found is None:
            return begin(resume_from_checkpoint, *arguments, **others)
        with TemporaryDirectory(prefix="swapper-trainer-") as folder:
            self._place.write(folder)
            try:
                return begin(folder, *arguments, **others)
            finally:
                self._place.found = None  # a second train() starts over, as a Trainer's

    # --- what a Trainer does with a model and a checkpoint, if swapper has done it ------------------------------------

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        if self._is_offloaded:
            super()._move_model_to_device(model, device)  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *others: Any, **more: Any) -> None:
        if not self._is_place(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, *others, **more)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._place is not None and self._is_place(checkpoint):
            self._place.set_schedule()
        else:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._place is not None and self._is_place(checkpoint):
            set_rng_states(self._place.rng)
        else:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]

    def _run_epoch(self, *arguments: Any, **others: Any) -> None:
        trainer: Any = self
        if trainer.state.global_step >= trainer.state.max_steps:  # a Trainer would take one more step
            trainer.control.should_training_stop = True
        else:
            super()._run_epoch(*arguments, **others)  # type: ignore[misc]

    def _is_place(self, checkpoint: str | None) -> bool:
        return self._place is not None and self._place.folder is not None and checkpoint == self._place.folder


def _open(directory: str | os.PathLike[str]) -> SwapManager:
    """Return a manager that is closed when the program ends, so that a script's last step is committed too."""
    manager = SwapManager(directory, resume="auto", rng=True)
    found = weakref.ref(manager)
    if not is_off("atexit"):
        atexit.register(lambda: None if (still := found()) is None else still.close())
    return manager


def _check(trainer: Any) -> None:
    """Raise UnsupportedError if the Trainer makes its model or its optimizer later, or another engine shards it."""
    if trainer.model_init is not None:
        raise UnsupportedError("model_init= makes a new model in each train(): give an offloaded Trainer model=")
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        name = "deepspeed" if trainer.is_deepspeed_enabled else "fsdp"
        raise UnsupportedError(
            f"TrainingArguments({name}=...) makes an engine of its own for the parameters that swapper would page: leave it "
            "out, or call fully_shard and manager.offload in a loop of your own (docs/guides/ranks.md)"
        )


class _Place:
    """The Trainer's place in its training: registered with the manager, so that each commit has it.

    Attributes:
        found: the state of the commit that the run is resumed from, until it is used.
        folder: contains this state in the Trainer's own form.
        rng: states of the random number generators that a resumed run begins with.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.found: dict[str, Any] | None = None
        self.folder: str | None = None
        self.rng = rng_states()  # offload has just restored them

    def state_dict(self) -> dict[str, Any]:
        """Return the Trainer's state without its history, and the schedule's.

        It is read after the schedule has stepped, maybe before the Trainer counts: the manager's steps count.
        """
        schedule, state = self._trainer.lr_scheduler, dataclasses.asdict(self._trainer.state)
        for name in ("log_history", "stateful_callbacks"):
            del state[name]
        return {
            "state": json.dumps(state, default=float),
            "step": self._trainer.manager.step,
            "schedule": None if schedule is None else schedule.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.found = state

    def write(self, folder: str) -> None:
        """Write a checkpoint of the Trainer's place alone.

        Raises:
            StateError: the manager has taken steps of which the Trainer does not know.
        """
        found = self.found
        if found is None or self._trainer.manager.step != found["step"]:
            raise StateError("the run has taken steps outside of this Trainer: make the Trainer before them")
        state = {**json.loads(found["state"]), "global_step": found["step"], "log_history": []}
        Path(folder, STATE_FILE).write_text(json.dumps({**state, "stateful_callbacks": {}}))
        self.folder = folder

    def set_schedule(self) -> None:
        """Set the Trainer's new schedule, and the learning rates that it has changed, to the commit's."""
        if self.found is None or self.found["schedule"] is None:
            return
        schedule = self._trainer.lr_scheduler
        schedule.load_state_dict(self.found["schedule"])
        for group, rate in zip(self._trainer.optimizer.param_groups, schedule.get_last_lr(), strict=True):
            group["lr"] = rate

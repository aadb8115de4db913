"""Trainers of Lightning, whose ingredients libraries.py draws."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fuzz.cases import Program
from fuzz.library_parts import LibraryLoop, loader_of, loss_of

ARGUMENTS: dict[str, list[Any]] = {
    "max_epochs": [1, 2, 3],
    "max_steps": [3, 5],
    "lines": [7, 8, 12],
    "accumulate_grad_batches": [2, 3],
    "gradient_clip_val": [0.05, 1e9],
    "gradient_clip_algorithm": ["norm", "value"],
    "precision": ["bf16-mixed", "bf16-true", "64-true"],
    "limit_train_batches": [2, 0.5],
    "limit_val_batches": [1, 0],
    "check_val_every_n_epoch": [2],
    "val_check_interval": [1, 2, 0.5],
    "num_sanity_val_steps": [0],
    "detect_anomaly": [True],
    "overfit_batches": [2],
    "reload_dataloaders_every_n_epochs": [1],
    "inference_mode": [False],
    "deterministic": [True],
    "log_every_n_steps": [1],
    "barebones": [True],
    "use_distributed_sampler": [False],
}
OWN: dict[str, list[Any]] = {
    "schedule": ["steps", "cosine", "one cycle", "warmup", "lambda", "plateau", None],
    "interval": ["step", "epoch"],
    "frequency": [1, 1, 2],
    "optimization": ["automatic", "automatic", "automatic", "by hand", "two"],
    "whole": [True, False],
    "callbacks": ["checkpoint", "checkpoint", "early stopping", "average", "accumulation", "unfreezing", "rates"],
}
CHECKPOINTS: list[dict[str, Any]] = [
    {"every_n_train_steps": 2, "save_top_k": -1},
    {"every_n_epochs": 1, "save_top_k": -1, "save_last": True},
    {"monitor": "val_loss", "save_top_k": 1},
    {"monitor": "loss", "mode": "max", "save_top_k": 2, "save_weights_only": True},
    {"save_on_train_epoch_end": True, "save_last": "link"},
    {"every_n_train_steps": 1, "save_top_k": 1, "save_last": True},
]
EVENTS = {
    "train_batch_start": "reads and writes",
    "after_backward": "gradients",
    "before_optimizer_step": "gradients",
    "before_zero_grad": "reads",
    "train_batch_end": "reads and writes",
    "train_epoch_start": "reads and writes",
    "train_epoch_end": "reads and writes",
    "validation_start": "reads",
    "validation_end": "reads and writes",
    "train_start": "reads and writes",
    "train_end": "reads",
}
"""Hooks of a callback, without "on_", and what may be done there."""


class Module(lightning.LightningModule):
    """A model of a program, and what it trains by."""

    def __init__(self, loop: LightningLoop) -> None:
        super().__init__()
        self.net = loop.make_model()
        self._loop = [loop]  # not copied, as the manager in it cannot be
        self.automatic_optimization = loop.arguments["optimization"] == "automatic"

    def __deepcopy__(self, memo: dict[int, Any]) -> Module:
        loop, self._loop = self._loop, []
        try:
            copied = object.__new__(type(self))
            memo[id(self)] = copied
            copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        finally:
            self._loop = loop
        return copied

    def configure_optimizers(self) -> Any:
        return self._loop[0].make_optimizers(self)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor | None:
        loss = loss_of(self.net, batch)
        self._loop[0].results.append((self.global_step + 1, -1, "loss", loss.detach()))
        self.log("loss", loss.detach())
        if self.automatic_optimization:
            return loss
        optimizers = self.optimizers()
        for number, optimizer in enumerate(optimizers if isinstance(optimizers, list) else [optimizers]):
            self._step_by_hand(optimizer, loss if number == 0 else loss_of(self.net, batch))
        self._schedule_by_hand()
        return None

    def _step_by_hand(self, optimizer: Any, loss: torch.Tensor) -> None:
        """Clip by torch's function: Lightning's refuses optimizers that a GradScaler calls, as each of several is here."""
        optimizer.zero_grad()
        self.manual_backward(loss)
        if self._loop[0].program["options"]["update"] != "backward":
            torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.05)
        optimizer.step()

    def _schedule_by_hand(self) -> None:
        schedules = self.lr_schedulers()
        for schedule in schedules if isinstance(schedules, list) else [schedules] if schedules is not None else []:
            if not isinstance(schedule, ReduceLROnPlateau):
                schedule.step()

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("val_loss", loss_of(self.net, batch))

    def test_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("test_loss", loss_of(self.net, batch))

    def predict_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.net(batch).clone()

    def train_dataloader(self) -> Any:
        return loader_of(self._loop[0].arguments["lines"], seed=5)

    def val_dataloader(self) -> Any:
        return loader_of(3)


class Acting(Callback):
    """Does a program's actions at the events of a Trainer."""

    def __init__(self, loop: LightningLoop) -> None:
        self._loop = loop

    def __getattribute__(self, name: str) -> Any:
        event = name.removeprefix("on_")
        if not name.startswith("on_") or event not in EVENTS:
            return super().__getattribute__(name)
        return lambda *given, **named: self._loop.event(event)


class Unfreezing(BaseFinetuning):
    """Trains a layer from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net.layers[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.layers[0], optimizer, lr=1e-3)


class LightningLoop(LibraryLoop):
    """A training by Lightning's Trainer."""

    def __init__(self, program: Program, directory: Path, is_offloaded: bool) -> None:
        super().__init__(program, directory, is_offloaded)
        self.trainer: Any = None
        self.module: Any = None
        self.runs = 0
        logging.getLogger("lightning.pytorch").setLevel(logging.CRITICAL)

    def run(self) -> None:
        self.fit()
        for name in self.program["after"]:
            self.follow(name)
        self.found |= {
            "model": self.module.net.state_dict(),
            "optimizer": [optimizer.state_dict()["state"] for optimizer in self.trainer.optimizers],
            "schedules": [config.scheduler.state_dict() for config in self.trainer.lr_scheduler_configs],
            "metrics": {self.plain_name(name): value for name, value in self.trainer.callback_metrics.items()},
            "place": (self.trainer.global_step, self.trainer.current_epoch),
            "files": self.files(),
        }

    def fit(self, checkpoint: Path | None = None) -> None:
        """Train a new module, as a script does that starts."""
        self._kept.clear()
        self.runs += 1
        given = {name: value for name, value in self.arguments.items() if name not in OWN}
        given.pop("lines")
        self.module = Module(self)
        self.seed()
        self.trainer = lightning.Trainer(
            accelerator="cpu",
            default_root_dir=self.directory,
            callbacks=[*self.callbacks(), Acting(self)],
            logger=CSVLogger(self.directory, "log", f"{self.runs}")
            if "rates" in self.arguments["callbacks"]
            else False,
            enable_checkpointing="checkpoint" in self.arguments["callbacks"],
            enable_progress_bar=False,
            enable_model_summary=False,
            **given,
        )
        self.trainer.fit(self.module, ckpt_path=checkpoint)

    def callbacks(self) -> list[Any]:
        number = self.program["seed"] % len(CHECKPOINTS)
        makers: dict[str, Callable[[], Any]] = {
            "checkpoint": lambda: ModelCheckpoint(
                self.directory / f"checkpoints-{self.runs}", "{epoch}-{step}", **CHECKPOINTS[number]
            ),
            "early stopping": lambda: EarlyStopping("val_loss", patience=1, min_delta=1.0),
            "average": lambda: EMAWeightAveraging(decay=0.9),
            "accumulation": lambda: GradientAccumulationScheduler({0: 2, 1: 1}),
            "unfreezing": Unfreezing,
            "rates": lambda: LearningRateMonitor("step"),
        }
        return [makers[name]() for name in dict.fromkeys(self.arguments["callbacks"])]

    def make_optimizers(self, module: Module) -> Any:
        parameters = [p for p in module.parameters() if p.requires_grad]
        parts = [parameters[::2], parameters[1::2]] if self.arguments["optimization"] == "two" else [parameters]
        optimizers: list[Any] = [self.make_optimizer(part) for part in parts]
        if self.is_offloaded:
            one = optimizers if len(optimizers) > 1 else optimizers[0]
            if self.manager is not None:
                self.manager.close()
            options = self.make_manager(module, one, resume="discard")
            _, offloaded = self.manager.offload(module if self.arguments["whole"] else module.net, one, **options)
            optimizers = offloaded if len(optimizers) > 1 else [offloaded]
        return optimizers, [self.schedule_of(optimizer) for optimizer in optimizers if self.arguments["schedule"]]

    def schedule_of(self, optimizer: Any) -> dict[str, Any]:
        given = self.arguments
        frequency = {"interval": given["interval"], "frequency": given["frequency"]}
        if given["schedule"] == "plateau":
            schedule: Any = ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return {"scheduler": schedule, "monitor": "loss", "strict": False, **frequency}
        return {"scheduler": self.make_schedule(optimizer), **frequency}

    def follow(self, name: str) -> None:
        """Do one thing that follows the training."""
        trainer, loader = self.trainer, loader_of(5)
        result: Any = None
        if name == "validate":
            result = trainer.validate(self.module, verbose=False)
        elif name == "test":
            result = trainer.test(self.module, loader, verbose=False)
        elif name == "predict":
            result = trainer.predict(self.module, loader)
        elif name == "save":
            trainer.save_checkpoint(self.directory / "saved.ckpt")
        elif name == "from a checkpoint":
            saved = sorted((self.directory / f"checkpoints-{self.runs}").glob("*.ckpt"))
            if saved:
                self.fit(saved[0])
        self.results.append((1 << 20, 0, name, result))

    def event(self, event: str) -> None:
        if self.trainer.state.fn != "fit" or self.trainer.sanity_checking:
            return
        optimizers = self.trainer.optimizers
        self.act(event, self.trainer.global_step, lambda: self.side(self.module.net, optimizers[0]), {})

    def files(self) -> dict[str, Any]:
        """Return what checkpoints and logs have."""
        found: dict[str, Any] = {}
        for path in sorted(self.directory.glob("**/*.ckpt")):
            saved = torch.load(path, weights_only=False)
            found[str(path.relative_to(self.directory))] = {
                key: str(value).replace(str(self.directory), "") if key in ("callbacks", "loops") else value
                for key, value in saved.items()
            }
        for path in sorted(self.directory.glob("**/metrics.csv")):
            found[str(path.relative_to(self.directory))] = self.plain_name(path.read_text())
        return found

    def plain_name(self, text: str) -> str:
        """Return a text with the original's class where LearningRateMonitor names that of the optimizer."""
        optimizer = self.trainer.optimizers[0]
        return text.replace("PagedOptimizer", type(getattr(optimizer, "_original", optimizer)).__name__)

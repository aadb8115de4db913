"""A script that Lightning's own launcher starts on two ranks, as `python script.py`: it trains a plain or an offloaded module.

Usage: lightning_run.py DIRECTORY RESULT STRATEGY HOW [CHECKPOINT]. STRATEGY is ddp or model_parallel. HOW is plain; ours; early,
with a manager from before the ranks; or an update time. Each rank leaves losses and parameters in RESULT.rank-R.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import swapper

NVME = {"params": "nvme", "optimizer_state": "nvme"}
RANKS = 2


class Module(lightning.LightningModule):
    def __init__(self, directory: Path, strategy: str, how: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(4)))
        self.losses: list[torch.Tensor] = []
        self.directory, self.strategy_name, self.how = directory, strategy, how
        self.manager = self.make_manager() if how == "early" else None

    def make_manager(self) -> swapper.SwapManager:
        return swapper.SwapManager(self.directory / "run", "16MiB/node" if self.how != "early" else "8MiB")

    def configure_model(self) -> None:
        if self.strategy_name == "model_parallel":
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
            for layer in self.net:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.net, mesh=mesh)

    def configure_optimizers(self) -> Any:
        optimizer: Any = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if self.how != "plain":
            self.manager = self.manager or self.make_manager()
            update = self.how if self.how in ("deferred", "backward") else "step"
            _, optimizer = self.manager.offload(self.net, optimizer, update=update, **NVME)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        self.losses.append(loss.detach())
        return loss


def main(directory: Path, result: str, strategy: str, how: str, checkpoint: str | None = None) -> None:
    is_ddp = strategy == "ddp"
    saving = ModelCheckpoint(dirpath=directory / result, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    clipping: dict[str, Any] = {} if how == "backward" else {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=RANKS, max_steps=4, logger=False, default_root_dir=directory,
        strategy="ddp" if is_ddp else ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1),
        callbacks=[saving] if is_ddp else [], enable_checkpointing=is_ddp, enable_progress_bar=False, enable_model_summary=False,
        **clipping,
    )  # fmt: skip
    module = Module(directory, strategy, how)
    data = torch.randn(32, 256, generator=torch.Generator().manual_seed(3))
    trainer.fit(module, DataLoader(data, batch_size=2), ckpt_path=checkpoint)
    if module.manager is not None:
        assert module.manager.step == 4 - (2 if checkpoint else 0)
    parameters = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in module.parameters()]
    torch.save(
        [*module.losses, *(value.detach().clone() for value in parameters)],
        directory / f"{result}.rank-{trainer.global_rank}.pt",
    )
    if module.manager is not None:
        module.manager.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

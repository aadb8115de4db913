"""One of several ranks under torchrun: loops of other libraries on a plain and on an offloaded model; both must go the same way.

Usage: libraries_run.py DIRECTORY CASE ...
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import swapper

NVME = {"params": "nvme", "optimizer_state": "nvme"}
Case = Callable[[Path, bool], list[torch.Tensor]]


def layers(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(4)))


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, 256, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))


def whole(state: dict[str, Any]) -> list[torch.Tensor]:
    return [value.full_tensor() if hasattr(value, "full_tensor") else value.clone() for value in state.values()]


def manager_of(directory: Path) -> swapper.SwapManager:
    return swapper.SwapManager(directory / "run", "8MiB")


# --- DistributedDataParallel around an offloaded model ------------------------------------------------------------------


def wrapped_later(directory: Path, swapped: bool) -> list[torch.Tensor]:
    """Ranks begin with other values each, on NVMe and resident: DDP's constructor gives all those of the first."""
    model = layers(seed=dist.get_rank()).bfloat16()
    model[0][0].weight.data[0, 0], model[1][0].weight.data[0, 0] = (
        (-0.0, float("nan")) if dist.get_rank() else (0.0, 1.0)
    )
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = manager_of(directory) if swapped else None
    if manager is not None:
        _, optimizer = manager.offload(model, optimizer, **NVME)
    wrapped = DistributedDataParallel(model)
    losses = []
    for number in range(3):
        optimizer.zero_grad()
        loss = wrapped(batch(number).bfloat16()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    losses += whole(model.state_dict())
    if manager is not None:
        manager.close()
    return losses


def masters_follow(directory: Path, swapped: bool) -> list[torch.Tensor]:
    """fp32 masters follow DDP's constructor: ranks that begin apart go the way of ranks that do not."""
    model = layers(seed=dist.get_rank() if swapped else 0).bfloat16()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    with swapper.SwapManager(directory / f"masters-{swapped}", "8MiB") as manager:
        _, optimizer = manager.offload(model, optimizer, master_weights=torch.float32, **NVME)
        wrapped = DistributedDataParallel(model)
        for number in range(3):
            optimizer.zero_grad()
            wrapped(batch(number).bfloat16()).square().mean().backward()
            optimizer.step()
        return whole(model.state_dict())


def refused(directory: Path, swapped: bool) -> list[torch.Tensor]:
    """DDP averages gradients too late for update="backward"."""
    if swapped:
        model = layers()
        with manager_of(directory) as manager:
            manager.offload(model, torch.optim.SGD(model.parameters(), lr=0.1), update="backward", **NVME)
            try:
                DistributedDataParallel(model)
            except swapper.UnsupportedError as error:
                assert "update='step'" in str(error)
            else:
                raise AssertionError("not refused")
    return []


def refused_inside(directory: Path, swapped: bool) -> list[torch.Tensor]:
    """Nor can it with a DDP around the model that offload is not given, as Lightning's."""
    if swapped:
        model = layers()
        wrapped = DistributedDataParallel(model)
        with manager_of(directory) as manager:
            manager.offload(model, torch.optim.SGD(model.parameters(), lr=0.1), update="backward", **NVME)
            try:
                wrapped(batch(0))
            except swapper.UnsupportedError as error:
                assert "update='step'" in str(error)
            else:
                raise AssertionError("not refused")
    return []


# --- accelerate ---------------------------------------------------------------------------------------------------------


def accelerated(directory: Path, swapped: bool, order: str = "", plugin: Any = None) -> list[torch.Tensor]:
    """A loop by accelerate; its checkpoint is taken in the middle and gone back to once."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, DistributedType, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    if plugin is not None:  # accelerate shards on accelerators only: it is told that this is one
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    model = layers()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = manager_of(directory) if swapped else None
    if manager is not None and order == "offload first":
        model, optimizer = manager.offload(model, optimizer, **NVME)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    if manager is not None and order == "prepare first":
        plan = manager.plan(model, optimizer, **NVME)
        assert manager.offload(model, optimizer, plan) == (model, optimizer)
    assert plugin is None or all(isinstance(parameter, DTensor) for parameter in model.parameters())
    losses = []
    for number in range(8):
        with accelerator.accumulate(model):
            loss = model(batch(number)).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                losses.append(accelerator.clip_grad_norm_(model.parameters(), 0.05))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        if number == 3 and plugin is None:
            accelerator.save_state(str(directory / f"state-{swapped}"))
        if number == 5 and plugin is None:
            accelerator.load_state(str(directory / f"state-{swapped}"))
    losses = whole(dict(enumerate(losses))) + whole(model.state_dict())
    if manager is not None:
        manager.close()
    return losses


def sharded_by_accelerate(directory: Path, swapped: bool) -> list[torch.Tensor]:
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=20_000, cpu_ram_efficient_loading=False
    )
    return accelerated(directory, swapped, "prepare first", plugin)


# --- the Trainer of transformers ----------------------------------------------------------------------------------------


def trainer(directory: Path, swapped: bool, sharded: bool = False) -> list[torch.Tensor]:
    from accelerate.state import AcceleratorState, GradientState
    from transformers import Trainer, TrainingArguments

    from e2e.test_libraries import Lines, llama

    AcceleratorState._reset_state()
    GradientState._reset_state()
    model = sharded_at_load(directory) if sharded else llama(lora=False)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    manager = swapper.SwapManager(directory / "run", "8MiB") if swapped else None
    if manager is not None:
        model, optimizer = manager.offload(model, optimizer, **NVME)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    arguments = TrainingArguments(
        output_dir=str(directory / f"out-{swapped}"), per_device_train_batch_size=2, max_steps=3, logging_steps=1,
        gradient_accumulation_steps=2, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    loop = Trainer(model=model, args=arguments, train_dataset=Lines(), optimizers=(optimizer, schedule))
    loop.train()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters()) == sharded
    log = [entry[key] for entry in loop.state.log_history for key in ("loss", "grad_norm") if key in entry]
    result = [torch.tensor(log), *whole(model.state_dict())]
    if manager is not None:
        assert manager.step == 3
        manager.close()
    return result


def sharded_at_load(directory: Path) -> Any:
    """A model that transformers shards by fully_shard as it is loaded: then the Trainer leaves it as it is."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    from e2e.test_libraries import llama

    path = directory / "published"
    if dist.get_rank() == 0 and not path.exists():
        llama(lora=False).save_pretrained(path)
    dist.barrier()
    return LlamaForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(fsdp_size=dist.get_world_size()))


# --- PEFT ---------------------------------------------------------------------------------------------------------------


def lora_by_peft(directory: Path, swapped: bool) -> list[torch.Tensor]:
    """The base is sharded, and each rank reads its rows of it in place: the run's own files have the adapters alone."""
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import save_file

    from swapper.integrations.peft import base_names

    base = layers()
    if dist.get_rank() == 0 and not swapped:
        save_file(base.state_dict(), directory / "base.safetensors")
    dist.barrier()
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["1.0", "2.0"]))  # type: ignore[arg-type]
    external = swapper.ExternalWeights(path=directory / "base.safetensors", rename=base_names(model))
    for layer in base:
        fully_shard(layer)
    fully_shard(model)  # type: ignore[arg-type]
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    manager = manager_of(directory) if swapped else None
    if manager is not None:
        _, optimizer = manager.offload(model, optimizer, **NVME, external=external)
        assert len(manager.current.run.plan.inventory.external) == 8
    losses = []
    for number in range(4):
        losses.append(model(batch(number)).square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    losses += whole(dict(model.named_parameters()))
    if manager is not None:
        assert manager.step == 4
        manager.close()
    return [loss.detach() for loss in losses]


# --- torchtitan ---------------------------------------------------------------------------------------------------------


def sharded_by_torchtitan(directory: Path, swapped: bool) -> list[torch.Tensor]:
    """Its loop: containers of optimizers and of schedules, whose state dicts are taken in the middle and gone back to."""
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
    from torchtitan.distributed.utils import clip_grad_norm_

    model = layers()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    groups = [("bias", {"lr": 1e-2, "weight_decay": 0.0}), (".*", {"lr": 1e-2})]
    config = OptimizersContainer.Config(
        param_groups=[ParamGroupConfig(pattern=p, optimizer_name="AdamW", optimizer_kwargs=o) for p, o in groups]
    )
    optimizers = OptimizersContainer(config, model_parts=[model])
    manager = manager_of(directory) if swapped else None
    if manager is not None:
        assert manager.offload(model, optimizers, **NVME) == (model, optimizers)
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in optimizers]
    losses, state = [], {}
    for number in range(6):
        optimizers.zero_grad()
        loss = model(batch(number)).square().mean()
        loss.backward()
        losses += [loss.detach(), clip_grad_norm_(model.parameters(), 0.05)]
        optimizers.step()
        for schedule in schedules:
            schedule.step()
        if number == 2:
            state = copy.deepcopy(optimizers.state_dict())
        if number == 4:
            optimizers.load_state_dict(state)
    losses = whole(dict(enumerate(losses))) + whole(model.state_dict())
    losses += whole({key: value for key, value in optimizers.state_dict().items() if key.startswith("state.")})
    if manager is not None:
        assert manager.step == 6
        manager.close()
    return losses


CASES: dict[str, Case] = {
    "wrapped later": wrapped_later,
    "masters follow": masters_follow,
    "refused": refused,
    "refused inside": refused_inside,
    "accelerate, offload first": lambda directory, swapped: accelerated(directory, swapped, "offload first"),
    "accelerate, prepare first": lambda directory, swapped: accelerated(directory, swapped, "prepare first"),
    "accelerate, FSDP2": sharded_by_accelerate,
    "trainer": trainer,
    "trainer, FSDP2": lambda directory, swapped: trainer(directory, swapped, sharded=True),
    "peft": lora_by_peft,
    "torchtitan": sharded_by_torchtitan,
}

LIBRARIES = {
    name: name.partition(",")[0] if name.startswith(("accelerate", "trainer", "peft", "torchtitan")) else "torch"
    for name in CASES
}
"""By case, whose it is."""


def run(directory: Path, name: str) -> None:
    directory.mkdir(exist_ok=True)
    dist.barrier()
    plain = CASES[name](directory, False)
    ours = CASES[name](directory, True)
    assert len(ours) == len(plain)
    for number, (one, other) in enumerate(zip(ours, plain, strict=True)):
        assert torch.equal(one, other), (name, number)
    os.write(1, f"rank {dist.get_rank()}, {name}: same\n".encode())  # at once: both ranks write there


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for name in sys.argv[2:]:
        run(Path(sys.argv[1], f"case-{list(CASES).index(name)}"), name)
    dist.destroy_process_group()

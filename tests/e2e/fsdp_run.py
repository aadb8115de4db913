"""One of several ranks under torchrun: FSDP2 over gloo on a plain and on a swapped model; both must go the same way.

Usage: fsdp_run.py DIRECTORY UPDATE [CASE ...], the time of updates, as for `offload`, and some of CASES. FSDP_RUN_DEVICE=cuda in
the environment has each rank compute, and update, on a device of its own; the plain model has a CPUOffloadPolicy then.
FSDP_RUN_UPDATES=late, or another order of tests/infer/host_device.py, has updates on a device of host memory.
"""

from __future__ import annotations

import copy
import gc
import importlib
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from infer.host_device import ORDERS, HostDevice
from safetensors.torch import save_file
from torch import nn
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import swapper
from e2e.early import sealed
from e2e.twins import named_budget
from swapper.train.sharded import buffers

DEVICE = os.environ.get("FSDP_RUN_DEVICE", "cpu")
UPDATES = os.environ.get("FSDP_RUN_UPDATES", "")


def join() -> None:
    if DEVICE == "cuda":
        if "STAND_IN_DEVICES" in os.environ:
            importlib.import_module("cuda_stand_in.plugin")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:gloo" if DEVICE == "cuda" else "gloo")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width + 1)  # not a multiple of any number of ranks
        self.down = nn.Linear(3 * width + 1, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 50, bias=False)
        self.checkpoints = False
        self.rounds = 1

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in [*self.blocks] * self.rounds:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(x)


def tied(model: Model) -> None:
    model.head.weight = model.embedding.weight


def frozen(model: Model) -> None:
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad_(False)


def base_frozen(model: Model) -> None:
    """As for LoRA: large weights are frozen, small ones are trained. Some are padded on some ranks."""
    tied(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.dim() == 1 and "up" not in name)


def checkpointed(model: Model) -> None:
    model.checkpoints = True


def unfreeze(model: Any, optimizer: torch.optim.Optimizer) -> None:
    more = list(model.blocks[1].parameters())
    for parameter in more:
        parameter.requires_grad_(True)
    optimizer.add_param_group({"params": more, "lr": 5e-3})


def called_twice(model: Model) -> None:
    model.rounds = 2


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fused": {"optimizer": lambda model: adamw(model, fused=True)},
    "foreach": {"optimizer": lambda model: adamw(model, foreach=True)},
    "sgd": {"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)},
    "bf16 compute": {
        "policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "predicted": True,
    },
    "bf16 reduce": {"policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)},
    "clipped": {"clip": True},
    "accumulated": {"passes": 2},
    "accumulated without sync": {"passes": 2, "no_sync": True},
    "tied": {"change": tied},
    "frozen": {"change": frozen},
    "checkpointing": {"change": checkpointed},
    "called twice": {"change": called_twice, "waits": True},
    "called twice, accumulated": {"change": called_twice, "waits": True, "passes": 2},
    "scheduled": {"scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)},
    "not resharded": {"reshard": False},
    "replicated": {"mesh": "replicated"},
    "replicas": {"mesh": "replicas"},
    "replicas, bf16 compute, accumulated without sync": {
        "mesh": "replicas",
        "policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "passes": 2,
        "no_sync": True,
    },
    "replicas on meta, frozen, tied, from a file": {
        "mesh": "replicas",
        "init": "file",
        "change": lambda model: (tied(model), frozen(model)),
    },
    "host memory by FSDP2": {"host": True},
    "parameters in host memory": {"params": "host"},
    "gradients on NVMe": {"gradients": "nvme"},
    "gradients on NVMe, clipped and accumulated": {"gradients": "nvme", "clip": True, "passes": 2},
    "gradients on NVMe, zeroed": {"gradients": "nvme", "zeroed": True},
    "external": {"init": "file", "change": base_frozen, "external": True},
    "external, bf16 compute": {
        "init": "file",
        "change": base_frozen,
        "external": True,
        "policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    },
    "unfrozen": {"change": frozen, "unfrozen_at": 2},
    "unfrozen, gradients on NVMe": {"change": frozen, "unfrozen_at": 1, "gradients": "nvme"},
    "unfrozen, parameters in host memory": {"change": frozen, "unfrozen_at": 1, "params": "host"},
    "on meta, by a function": {"init": "function"},
    "on meta, from a file": {"init": "file"},
    "on meta, tied, by a function": {"init": "function", "change": tied},
    "on meta, frozen, tied, from a file": {"init": "file", "change": lambda model: (tied(model), frozen(model))},
}


def mesh_of(case: dict[str, Any]) -> Any:
    size = dist.get_world_size()
    shape = (size // 2, 2) if case.get("mesh") == "replicated" and size % 2 == 0 else (size,)
    return init_device_mesh(DEVICE, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


@torch.no_grad()
def initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        module.reset_parameters()
    if isinstance(module, Block):
        module.scale.fill_(0.5)


def make_whole(case: dict[str, Any]) -> Model:
    torch.manual_seed(0)
    model = Model()
    case.get("change", lambda model: None)(model)
    if "init" in case:
        torch.manual_seed(1)
        for module in model.modules():
            initialize(module)
    return model


def source_of_values(case: dict[str, Any], directory: Path) -> Any:
    """Return `init=` of a model on meta, which gets the values of `make_whole`."""
    if case.get("init") == "file":
        if dist.get_rank() == 0:
            values = dict(make_whole(case).named_parameters())
            save_file({name: value.detach() for name, value in values.items()}, directory / "values.safetensors")
        dist.barrier()
        return directory / "values.safetensors"
    return initialize if "init" in case else None


def make(case: dict[str, Any], is_meta: bool = False, is_plain: bool = False) -> tuple[Model, torch.optim.Optimizer]:
    if is_meta:
        with torch.device("meta"):
            model = Model()
        case.get("change", lambda model: None)(model)
    else:
        model = make_whole(case)
    options: dict[str, Any] = {"reshard_after_forward": case.get("reshard", True)}
    if "policy" in case:
        options["mp_policy"] = case["policy"]
    if case.get("host") or (is_plain and DEVICE == "cuda"):
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    options["mesh"] = mesh_of(case)
    shard: Any = fully_shard
    if case.get("mesh") == "replicas":
        shard = replicate_with_fsdp.replicate
        del options["reshard_after_forward"]
    for block in model.blocks:
        shard(block, **options)
    shard(model, **options)
    return model, case.get("optimizer", adamw)(model)


def loss_of(model: Any, batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * batch + dist.get_rank())
    tokens = torch.randint(50, (2, 9), generator=generator).to(DEVICE)
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def train(
    model: Any, optimizer: Any, case: dict[str, Any], scheduler: Any, step: int, manager: Any = None
) -> torch.Tensor:
    """Train a step. `manager`: of the model, if it is swapped."""
    losses = []
    for number in range(passes := case.get("passes", 1)):
        if case.get("no_sync"):
            model.set_requires_gradient_sync(number == passes - 1)
        with manager.accumulate() if manager is not None and number < passes - 1 else nullcontext():
            loss = loss_of(model, 100 * step + number)
            loss.backward()
        losses.append(loss.detach())
    if case.get("clip"):
        losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor())
    if manager is not None:
        updates = manager.current.run.model.updates
        if updates.follows_backward and not case.get("waits"):  # all groups are updated by now
            left = set(updates._trainables) - sealed(manager.current.run.model.groups)
            assert len(left) <= manager.current.run.placed.processor.is_device  # its last gradients may come later
    optimizer.step()
    optimizer.zero_grad(set_to_none=not case.get("zeroed"))
    if scheduler is not None:
        scheduler.step()
    return torch.stack(losses)


def same(one: Any, other: Any, what: str) -> None:
    one, other = (getattr(value, "_local_tensor", value) for value in (one, other))
    assert torch.equal(one, other), what


def dist_objects(own: Any) -> list[Any]:
    """Return what each rank has."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def run(directory: Path, name: str, update: str, order: str = UPDATES) -> None:
    case = CASES[name]
    plain, plain_optimizer = make(case, is_plain=True)
    swapped, optimizer = make(case, is_meta="init" in case)
    make_scheduler: Callable[[Any], Any] = case.get("scheduler", lambda optimizer: None)
    placement = {"params": case.get("params", "nvme"), "optimizer_state": "nvme", "update": update}
    placement["gradients"] = case.get("gradients", "auto")
    if order:
        own = ORDERS[ORDERS.index(order) - dist.get_rank()]  # copies arrive at other moments on each rank
        placement |= {"device": HostDevice(own), "device_memory": "32MiB"}
    values = source_of_values(case, directory.parent)
    if "external" in case:
        placement["external"] = swapper.ExternalWeights(path=values)
    planned = make({}) if "unfrozen_at" in case else (swapped, optimizer)
    with swapper.SwapManager(directory, host_memory=1) as manager:
        try:
            manager.plan(*planned, **placement)
        except swapper.BudgetError as error:
            budget = max(dist_objects(named_budget(error)))
    del planned
    with swapper.SwapManager(directory, host_memory=budget, resume="discard") as manager:
        if case.get("predicted"):  # which changes nothing
            tokens = torch.zeros(2, 8, dtype=torch.long, device="meta")
            plan = manager.plan(swapped, optimizer, **placement)
            predicted = plan.predict(16, example=(tokens,), drive_read="1GB", drive_write="1GB")
            assert predicted.phases["forward"].computing_s > 0 and predicted.phases["backward"].computing_s > 0
            assert "activations" in plan.memory, "the model did not run"
        torch.manual_seed(1)  # as in `make_whole`
        _, optimizer = manager.offload(swapped, optimizer, **placement, init=values)
        assert all(parameter.device.type == "cpu" for parameter in swapped.parameters())
        if DEVICE == "cuda" and not case.get("predicted"):
            gc.collect()
            assert torch.cuda.memory_allocated() == 0  # the shards have left it
        schedulers = make_scheduler(plain_optimizer), make_scheduler(optimizer)
        for step in range(4):
            if step == case.get("unfrozen_at"):
                unfreeze(plain, plain_optimizer)
                unfreeze(swapped, optimizer)
            expected = train(plain, plain_optimizer, case, schedulers[0], step)
            losses = train(swapped, optimizer, case, schedulers[1], step, manager)
            same(losses, expected, f"{name}: losses of step {step}")
            assert manager.current.run.model.update_is_open == (update == "deferred" and "zeroed" not in case)
        with torch.no_grad():
            tokens = torch.arange(16).view(2, 8).to(DEVICE)
            same(swapped(tokens), plain(tokens), f"{name}: evaluation")
        for module in [*swapped.modules(), *plain.modules()]:
            if isinstance(module, FSDPModule):
                module.reshard()
        same_state(swapped, optimizer, plain, plain_optimizer, name)
        assert manager.counters.bytes_read > 0
        if order:
            assert manager.counters.uploaded_bytes > 0 and manager.counters.downloaded_bytes > 0
        if "external" in case:
            inventory = manager.current.run.plan.inventory
            assert "blocks.0.down.weight" in inventory.external or dist.get_world_size() == 3
            manager.snapshot(directory.with_name(f"{directory.name}-snapshot")).result()
            loaded = dict(plain.named_parameters())
            for parameter in loaded.values():
                parameter.data.zero_()
            state = {"model": get_model_state_dict(plain)}
            dcp.load(state, storage_reader=dcp.FileSystemReader(directory.with_name(f"{directory.name}-snapshot")))
            for key, parameter in swapped.named_parameters():
                same(parameter, loaded[key], f"{name}: {key} of the snapshot")
        assert bool(manager.counters.written_bytes["grad"]) == ("gradients" in case)
        if name == "plain":
            look_and_load(manager, swapped, optimizer, plain, plain_optimizer)
            for step in range(4, 6):
                expected = train(plain, plain_optimizer, case, None, step)
                same(train(swapped, optimizer, case, None, step), expected, f"after loading: step {step}")
    if name == "plain":
        resume(directory, budget, placement, case, plain, plain_optimizer)
    os.write(1, f"rank {dist.get_rank()}, {name}: same\n".encode())  # at once: both ranks write there


def same_state(swapped: Any, optimizer: Any, plain: Any, plain_optimizer: Any, what: str) -> None:
    pairs = dict(plain.named_parameters())
    for key, parameter in swapped.named_parameters():
        same(parameter, pairs[key], f"{what}: shard of {key}")
        same(parameter.full_tensor(), pairs[key].full_tensor(), f"{what}: {key}")
    ours, theirs = optimizer.state_dict()["state"], plain_optimizer.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for number, state in theirs.items():
        assert ours[number].keys() == state.keys()
        for key, value in state.items():
            assert type(ours[number][key]) is type(value), (number, key)
            same(ours[number][key], value, f"{what}: {key} of {number}")


def look_and_load(manager: Any, swapped: Any, optimizer: Any, plain: Any, plain_optimizer: Any) -> None:
    """What torch.distributed.checkpoint sees is what it sees of the plain model; loading and gather change what is paged."""
    ours, theirs = get_state_dict(swapped, optimizer), get_state_dict(plain, plain_optimizer)
    assert flat(ours).keys() == flat(theirs).keys()
    for key, value in flat(theirs).items():
        if isinstance(value, torch.Tensor):
            same(flat(ours)[key], value, f"get_state_dict: {key}")
        else:
            assert flat(ours)[key] == value, key
    saved = copy.deepcopy(theirs)
    for model, used in ((swapped, optimizer), (plain, plain_optimizer)):
        train(model, used, {}, None, 99)
        set_state_dict(model, used, model_state_dict=saved[0], optim_state_dict=copy.deepcopy(saved[1]))
    same_state(swapped, optimizer, plain, plain_optimizer, "loaded")
    for parameter in swapped.parameters():
        with manager.gather(parameter, write=True), torch.no_grad():
            parameter.mul_(1.5)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(1.5)
    same_state(swapped, optimizer, plain, plain_optimizer, "gathered")
    if manager.current.run.model.updates.follows_backward:
        return  # clipping is refused
    norms = []
    for model, used in ((swapped, optimizer), (plain, plain_optimizer)):
        model(torch.arange(16).view(2, 8).to(DEVICE)).sum().backward()
        clip = manager.clip_grad_norm_ if model is swapped else partial(nn.utils.clip_grad_norm_, model.parameters())
        norms.append(clip(0.5).full_tensor())
        used.step()
        used.zero_grad()
    same(norms[0], norms[1], "norms")
    same_state(swapped, optimizer, plain, plain_optimizer, "clipped")
    for call in (
        lambda: manager.snapshot("x", keep=1),
        lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    ):
        try:
            call()
        except swapper.UnsupportedError:
            continue
        raise AssertionError("not refused")


def flat(tree: Any, name: str = "") -> dict[str, Any]:
    if isinstance(tree, dict | list | tuple):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {key: value for part, child in items for key, value in flat(child, f"{name}/{part}").items()}
    return {name: tree}


def resume(directory: Path, budget: int, placement: Any, case: Any, plain: Any, plain_optimizer: Any) -> None:
    """The run goes on from its last commit in a model that was never trained."""
    model, optimizer = make(case)
    with swapper.SwapManager(directory, host_memory=budget, resume="auto") as manager:
        _, optimizer = manager.offload(model, optimizer, **placement)
        for step in range(6, 8):
            expected = train(plain, plain_optimizer, case, None, step)
            same(train(model, optimizer, case, None, step), expected, f"gone on: step {step}")


if __name__ == "__main__":
    join()
    if sys.argv[2] != "step":
        buffers.MIN_BROADCAST_BYTES = 0  # as with a large model
    for name in sys.argv[3:] or CASES:
        run(Path(sys.argv[1], f"case-{list(CASES).index(name)}"), name, sys.argv[2])
    dist.destroy_process_group()

"""Trains programs drawn from a seed on several ranks, by plain torch and offloaded, and compares them bit for bit.

Usage: tools/fuzz ranks [--minutes N] [--cases N] [--seed N] [--program JSON]

A program is as one of programs.py, of fewer ingredients, and how its model is spread: by DDP, by FSDP2 of some of its layers, or
whole on each rank, averaged by hand. Each rank is a process of its own.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from e2e.keywords import for_offload
from e2e.killed_ranks import launch
from e2e.racing_loops import Drive
from e2e.twins import Twins, named_budget
from infer.host_device import ORDERS, HostDevice
from torch import nn
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import swapper
from fuzz import programs
from fuzz.cases import REFUSED, Impossible, Kind, Program, outcome, run
from fuzz.export_sources import content_of
from fuzz.program_actions import ACTIONS, BEFORE_STEP, BETWEEN, STEPS
from fuzz.program_passes import PASSES, Action, Side
from fuzz.programs import RULES, Training, draw_layers, draw_options, draw_some, forbidden_to
from swapper.errors import BudgetError
from swapper.train.gradients.cold_grad import ColdGradient

POLICIES: dict[str, MixedPrecisionPolicy] = {
    "as they are": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "all bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
}
PR_SET_PDEATHSIG = 1
"""Of linux/prctl.h: a signal when the parent ends."""
LOST = ("Connection closed by peer", "Connection reset by peer")
"""What a rank says of another one that has ended."""
WHOLE = ("ddp", "by hand")
"""How a rank has a whole model that FSDP2 knows nothing of."""
SPREADS = ("fsdp2", "fsdp2", "replicas", *WHOLE)
PLAIN = {
    "tied": False,
    "rule": "adamw",
    "groups": "all",
    "policy": "as they are",
    "stays": False,
    "size": 2,
    "bucket_mb": 25,
    "views of buckets": False,
    "drives": 1,
    "hurries": None,
    "init": None,
}


# --- what only ranks do -----------------------------------------------------------------------------------------------


def without_sync(side: Side) -> Any:
    """Two micro-batches, of which the first reduces no gradients."""
    if side.spread == "by hand":
        losses = [side.backward(side.loss() / 2, is_last=False)]
    elif side.spread == "ddp":
        with side.model.no_sync():
            losses = [side.backward(side.loss() / 2, is_last=False)]
    else:
        side.model.set_requires_gradient_sync(False)
        losses = [side.backward(side.loss() / 2, is_last=False)]
        side.model.set_requires_gradient_sync(True)
    return [*losses, side.backward(side.loss() / 2)]


def read_whole(side: Side) -> Any:
    parameter = side.one
    return getattr(parameter, "full_tensor", parameter.detach)().clone()


def send(side: Side) -> Any:
    """A collective of a parameter, or of its state."""
    parameter, how = side.one, side.chance.choice(["broadcast", "sum", "sum of data", "gathered", "sum of state"])
    with torch.no_grad():
        if how == "broadcast":
            dist.broadcast(parameter, 0)
        elif how == "gathered":
            parts = [torch.empty(parameter.shape, dtype=parameter.dtype) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, parameter.detach())
            return parts
        elif how == "sum of state" and parameter in side.optimizer.state:
            for value in side.optimizer.state[parameter].values():
                if isinstance(value, torch.Tensor) and value.dim():
                    dist.all_reduce(value, dist.ReduceOp.MAX)
        else:
            dist.all_reduce(parameter.data if how == "sum of data" else parameter)
            parameter.data.div_(dist.get_world_size())
    return parameter.detach().clone()


def average_gradients(side: Side) -> Any:
    """What DDP does, by hand."""
    for parameter in side.trained:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())


def snapshot(side: Side) -> Any:
    """What an export of a snapshot has."""
    number, to = side.chance.random(), side.chance.choice(["safetensors", "torch"])
    if side.manager is None:
        return sorted(whole_state(side).items())
    path, target = (side.directory / f"{kind}-{number}" for kind in ("snapshot", "exported"))
    side.manager.snapshot(path).wait()
    dist.barrier()
    if dist.get_rank() == 0:
        swapper.checkpoint.export(path, target, to)
    dist.barrier()
    return sorted(content_of(target).items())


def whole_state(side: Side) -> dict[str, torch.Tensor]:
    """Return what the first rank has: of replicas, the others may have other buffers, and what was not averaged."""
    if side.spread in WHOLE:
        found = side.model.state_dict()
    else:
        found = get_model_state_dict(side.model, options=StateDictOptions(full_state_dict=True))
    every = [{name: value.clone() for name, value in found.items()} if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(every, 0)
    assert every[0] is not None
    return every[0]


OWN_PASSES = {"without sync": without_sync}
OWN_BEFORE_STEP = {"average gradients": average_gradients}
OWN_BETWEEN = {"read whole": read_whole, "whole state": whole_state, "send": send, "snapshot": snapshot}
BY_VALUES = {"experts", "by name", "dropped"}
"""Layers that choose by values, of which each rank has others: ranks would wait for each other for ever."""
WITH_BUFFERS = {"batch norm", "buffers", "spectral norm"}
NOT_OF_SHARDS = {
    *("average gradients", "send"),  # of parts of a tensor
    *("average", "average by torch", "by parts", "gradient penalty", "inner step", "park", "penalized", "together"),
    *("empty", "in double", "odd shapes", "own function", "bf16"),  # a layer has one dtype, and no single numbers
}
NOT_OF_REPLICAS = {
    "average gradients",
    *("by parts", "inner step", "only some", "penalized", "retained", "together", "two graphs"),
    *("checkpoint", "in two", "reentrant", "twice"),  # not with a search for parameters that are not used
}
"""Layers and actions that plain torch cannot do, or that are documented as refused."""


class Replica(DistributedDataParallel):
    """DDP with the names of what it wraps."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


def impossible_for(spread: str) -> set[str]:
    """Return the layers and actions that do not go with how ranks have the model."""
    return BY_VALUES | (NOT_OF_SHARDS if spread not in WHOLE else NOT_OF_REPLICAS if spread == "ddp" else set())


def of_ddp(chance: random.Random, options: dict[str, Any]) -> dict[str, Any]:
    """Return options that go with DDP: gradients are averaged where they are computed."""
    of_device = {"update_on": "device", "gradients": "device"} if "device" in options else {"gradients": "auto"}
    return {**options, "update": chance.choice(["step", "deferred"]), **of_device}


def draw_loop(chance: random.Random, spread: str, layers: list[str], options: dict[str, Any], rule: str) -> list[Any]:
    """Return the loop of a program for which this was drawn."""
    forbidden = impossible_for(spread) | forbidden_to(options, layers, [rule], master=False)
    forbidden |= {"look", "average gradients"} if options["update"] == "backward" else set()
    forbidden |= {"average gradients"} if options["gradients"] == "nvme" or "device" in options else set()
    some = partial(draw_some, chance, forbidden=forbidden)
    loop = []
    for _ in range(chance.randint(2, 4)):
        loop += some(RankTraining.passes if chance.random() < 0.6 else ["ordinary"], count=1)
        loop += some({**BEFORE_STEP, **OWN_BEFORE_STEP}, count=chance.choice([0, 0, 1]))
        loop += some(STEPS, count=1) if chance.random() < 0.2 else [["step", 0]]
        loop += [["zero", 0]] * (chance.random() < 0.7)
        loop += some({**BETWEEN, **OWN_BETWEEN}, count=chance.choice([0, 1, 1, 2]))
    failed = spread not in WHOLE and any(name == "interrupted" for name, _ in loop)
    if failed or (spread == "ddp" and any(kind in layer for layer in layers for kind in WITH_BUFFERS)):
        # What a new model has not: FSDP2 keeps something of a backward that failed, DDP whether it has averaged buffers.
        loop = [action for action in loop if not action[0].startswith("resume")]
    return loop


def draw(seed: str) -> Program:
    """Return the program of a seed."""
    chance = random.Random(seed)
    spread = chance.choice(SPREADS)
    is_sharded = spread not in WHOLE
    layers = draw_layers(chance, 4, impossible_for(spread))
    options = draw_options(chance)
    if chance.random() < 0.2:
        options |= {"device": chance.choice(ORDERS), "update_on": chance.choice(["cpu", "device"])}
    if spread == "ddp":
        options = of_ddp(chance, options)
    rule = chance.choice([name for name in RULES if not (is_sharded and name in ("muon", "adafactor"))])
    rule = "adamw" if rule == "adafactor" and any("empty" in layer for layer in layers) else rule
    loop = draw_loop(chance, spread, layers, options, rule)
    return {
        "seed": chance.randrange(1 << 30),
        "size": chance.choice([2, 2, 2, 1, 3]),
        "spread": spread,
        "alone": [chance.random() < 0.6 for _ in layers],
        "policy": chance.choice(list(POLICIES)) if is_sharded else "as they are",
        "stays": is_sharded and chance.random() < 0.3,
        "bucket_mb": chance.choice([25, 0.02]) if spread == "ddp" else 25,
        "views of buckets": spread == "ddp" and chance.random() < 0.4,
        "layers": layers,
        "tied": chance.random() < 0.3,
        "rule": rule,
        "more_rules": [],
        "groups": chance.choice(programs.GROUPS),
        "master": False,
        "drives": chance.choice([1, 1, 1, 2]),
        "hurries": programs.draw_hurries(chance),
        "init": programs.draw_init(chance, layers, ["torch", "safetensors"])
        if spread != "ddp"
        else None,  # which has other names
        "options": options,
        "loop": loop,
    }


def reshard(model: nn.Module) -> None:
    """Have its parameters be shards, and not what FSDP2 has gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class RankTwins(Twins):
    """Twins on a rank: all have the budget that the one which needs most names."""

    def smallest_budget(self, directory: Path) -> int:
        named = 0
        with swapper.SwapManager(directory, host_memory=1) as manager:
            try:
                manager.plan(self.swapped, self.original, **for_offload(self.options))
            except BudgetError as error:
                named = named_budget(error)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, named)
        return max(every)

    def assert_same_parameters(self) -> None:
        for model in (self.plain, self.swapped):
            reshard(model)
        super().assert_same_parameters()

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        local = getattr(parameter.grad, "_local_tensor", None)
        if type(getattr(local, "swapper_local", None)) is not ColdGradient:
            return super().gradient(parameter)
        assert self.manager is not None
        gradients = self.manager.current.run.model.gradients.paged
        return gradients._whole(gradients._slots[id(local.swapper_parameter)])


class RankTraining(Training):
    """The twins of a program, on one of its ranks."""

    passes: ClassVar[dict[str, Action]] = {**PASSES, **OWN_PASSES}
    actions: ClassVar[dict[str, Action]] = {**ACTIONS, **OWN_PASSES, **OWN_BEFORE_STEP, **OWN_BETWEEN}

    def __init__(self, program: Program, directory: Path, drive: Drive | None) -> None:
        super().__init__(program, directory, drive)
        for side in (self.plain, self.swapped):
            side.spread = program["spread"]
        self.rank = dist.get_rank()  # each has batches of its own

    def _make_pair(self, directory: Path, **options: Any) -> Twins:
        nothing, model = nn.Module(), self._model()  # which torch cannot copy
        pair = RankTwins(directory, nothing, lambda _: None, select=lambda _: [], **options)
        pair.plain, pair.plain_optimizer = model, self._optimizer(self._select(model))
        return pair

    def _device(self, order: str) -> dict[str, Any]:
        own = ORDERS[ORDERS.index(order) - dist.get_rank()]  # copies arrive at other moments on each rank
        return {"device": HostDevice(own), "device_memory": "64MiB"}

    def _model(self) -> Any:
        try:
            return self._spread(super()._model())
        except (RuntimeError, ValueError) as error:
            raise Impossible(str(error)) from error

    def _spread(self, model: Any) -> Any:
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()
        if self.program["spread"] == "by hand":
            return model
        if self.program["spread"] == "ddp":
            buckets = {
                "bucket_cap_mb": self.program["bucket_mb"],
                "gradient_as_bucket_view": self.program["views of buckets"],
            }
            return Replica(model, find_unused_parameters=True, **buckets)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": POLICIES[self.program["policy"]]}
        spread: Callable[..., Any] = replicate_with_fsdp.replicate
        if self.program["spread"] == "fsdp2":
            spread, options["reshard_after_forward"] = fully_shard, not self.program["stays"]
        for layer, is_alone in zip(model.layers, self.program["alone"], strict=False):
            if is_alone and not isinstance(layer, FSDPModule):
                spread(layer, **options)
        return spread(model, **options)

    def act(self, side: Side, name: str) -> Any:
        if name not in self.passes:
            reshard(side.model)
        try:
            return super().act(side, name)
        except RuntimeError as error:
            if (
                "inference tensor" in str(error).lower()
            ):  # the first forward of FSDP2's model must not be in inference_mode
                raise Impossible(str(error)) from error
            raise


def report(path: Path, act: Callable[[], str | None]) -> None:
    """Do the part of a rank, and write what went wrong with it: nothing, if all went well."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    problem = act()
    path.write_text(problem or "")
    if problem is not None:
        os._exit(1)  # what the others wait for does not come


def told(paths: Sequence[Path], may_end: bool = False) -> str | None:
    """Return what went wrong on a rank, None if nothing did; REFUSED and why, if one could not do it.

    Args:
        paths: of each rank's report.
        may_end: some were killed, and others may have noticed.
    """
    said = [path.read_text() if path.exists() else f"{path.name} ended early" for path in paths]
    said = [each for each, path in zip(said, paths, strict=True) if each and (path.exists() or not may_end)]
    apart = [each for each in said if not any(words in each for words in LOST)]
    said = apart if may_end else apart or said
    refused = [each for each in said if each.startswith(REFUSED)] if not may_end else []
    return next((each for each in said if not each.startswith(REFUSED)), refused[0] if refused else None)


def run_case(program: Program, directory: Path) -> str | None:
    """Return as `told`."""
    return run_ranks(program["size"], directory, lambda: programs.run_case(program, directory, RankTraining))


def run_ranks(size: int, meeting: Path, act: Callable[[], str | None], may_end: bool = False) -> str | None:
    """Have each rank do its part, which returns as `run_case`. They meet in a directory of their own. Returns as `told`."""
    paths = [meeting / f"rank-{rank}" for rank in range(size)]
    launch(size, meeting / "meeting", lambda: report(paths[dist.get_rank()], act))
    return told(paths, may_end)


def run_parts(size: int, directory: Path, parts: Sequence[Callable[[], None]]) -> str | None:
    """Have ranks, as processes that torchrun has started, do one part after another. All but the last part may be killed.

    Returns as `told`.
    """

    def act(part: Callable[[], None]) -> str | None:
        rank = str(dist.get_rank())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
        os.environ["ACCELERATE_USE_CPU"] = "true"
        return outcome(part, programs.REFUSALS)

    for number, part in enumerate(parts, 1):
        (meeting := directory / f"part-{number}").mkdir()
        problem = run_ranks(size, meeting, partial(act, part), may_end=number < len(parts))
        if problem is not None:
            return problem
    return None


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def meet() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier()


def smaller(program: Program) -> Iterator[Program]:
    """Yield programs with a part less."""
    yield from ({**program, name: value} for name, value in PLAIN.items() if program[name] != value)
    yield from programs.smaller(program)


RANKS = Kind("ranks", __doc__ or "", draw, run_case, smaller)


if __name__ == "__main__":
    sys.exit(run(RANKS, sys.argv[1:]))

"""Trains programs drawn from a seed on some ranks, goes on with another number of them, and compares with plain torch bit for bit.

Usage: tools/fuzz resharding [--minutes N] [--cases N] [--seed N] [--program JSON]

A program is one of ranks.py in stages, each with its number of ranks, its sharded layers and its loop. After each all ranks end,
and those of the next have new models: the plain one is given what the one before had, the swapped one finds it in directories.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from e2e.racing_loops import Drive
from torch.distributed.tensor import DTensor, distribute_tensor

from fuzz import programs, ranks
from fuzz.cases import Kind, Program, run
from fuzz.program_actions import STEPS
from fuzz.ranks import RankTraining

NOT_HERE = {"nadam", "asgd"}
"""Optimizers whose single numbers FSDP2 has in other dtypes."""


def whole(value: Any) -> Any:
    """Return a copy of all of a tensor, of which each rank may have a part; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.full_tensor().clone() if isinstance(value, DTensor) else value.detach().clone()


def part(value: Any, parameter: torch.Tensor) -> Any:
    """Return this rank's part of a tensor that is spread as its parameter; of one that is not, and of anything else, a copy."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(parameter, DTensor) and value.shape == parameter.shape:
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value.clone()


class Stage(RankTraining):
    """The twins of a stage, on one of its ranks."""

    resume_as = "reshard"

    def __init__(self, program: Program, directory: Path, drive: Drive | None) -> None:
        super().__init__(program, directory, drive)
        self._left = directory / "left.pt"

    def run(self) -> None:
        """Raises AssertionError where they differ."""
        if not self._left.exists():
            super().run()
            return
        left, pair = torch.load(self._left), self.pair
        self._give_plain(left)
        other = self.program["otherwise"]
        chance = None if other is None else random.Random(other)
        self.resume(left["layout"], pair.smallest_budget(self.probe) + pair.room_bytes, chance)
        assert pair.manager.step == left["step"], f"step {pair.manager.step} of {left['step']} was resumed"
        self.compare()
        self.go_on()
        self.finish()

    def finish(self) -> None:
        ranks.reshard(self.pair.swapped)
        layout, manager = self.layout(), self.pair.manager
        super().finish()
        left = {"layout": layout, "step": manager.step, **self._of_plain()}
        dist.barrier()  # after the others' last read of what was left before
        if self.rank == 0:
            torch.save(left, self._left)

    def _of_plain(self) -> dict[str, Any]:
        """Return all that the plain one has, as the first rank has it. All ranks call this."""
        model, optimizer = self.plain.model, self.plain.optimizer
        ranks.reshard(model)
        names = {parameter: name for name, parameter in model.named_parameters()}
        return {
            "parameters": {name: whole(parameter) for name, parameter in model.named_parameters()},
            "buffers": {name: whole(buffer) for name, buffer in model.named_buffers()},
            "state": {
                names[parameter]: {key: whole(value) for key, value in state.items()}
                for parameter, state in optimizer.state.items()
            },
            "settings": [
                {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
            ],
        }

    @torch.no_grad()
    def _give_plain(self, left: dict[str, Any]) -> None:
        model, optimizer = self.plain.model, self.plain.optimizer
        parameters = dict(model.named_parameters())
        for names in left["layout"]["groups"][len(optimizer.param_groups) :]:
            optimizer.add_param_group({"params": [parameters[name] for name in names]})
        for group, settings in zip(optimizer.param_groups, left["settings"], strict=True):
            group.update(settings)
        for name, parameter in parameters.items():
            parameter.copy_(part(left["parameters"][name], parameter))
            parameter.requires_grad_(left["layout"]["trained"][name])
        for name, buffer in model.named_buffers():
            buffer.copy_(left["buffers"][name])
        for name, state in left["state"].items():
            optimizer.state[parameters[name]] = {key: part(value, parameters[name]) for key, value in state.items()}


def draw(seed: str) -> Program:
    """Return the program of a seed."""
    chance = random.Random(f"{seed} resharding")
    program = ranks.draw(seed)
    program["options"]["commit_every"] = 1
    if program["rule"] in NOT_HERE:
        program["rule"] = "adamw"
    layers, options = program["layers"], program["options"]
    stages: list[dict[str, Any]] = []
    for number in range(chance.choice([2, 2, 3])):
        loop = ranks.draw_loop(chance, program["spread"], layers, options, program["rule"])
        ends = [name for name, _ in loop if name in STEPS or name.startswith("resume")]
        if ends[-1:] != ["step"]:  # what has changed since the last one may be in no commit
            loop += [["ordinary", number], ["step", 0], ["zero", 0]]
        stages.append(
            {
                "size": chance.choice([size for size in (1, 2, 2, 3, 4) if not number or size != stages[-1]["size"]]),
                "alone": program["alone"] if chance.random() < 0.5 else [chance.random() < 0.6 for _ in layers],
                "otherwise": chance.randrange(1000) if number and chance.random() < 0.3 else None,
                "loop": loop,
            }
        )
    return {**program, "loop": [], "stages": stages}


def run_case(program: Program, directory: Path) -> str | None:
    """Return what went wrong, None if nothing did; REFUSED and why, if swapper or what it is compared with cannot do it."""
    for number, stage in enumerate(program["stages"]):
        place = directory / f"stage-{number}"
        place.mkdir()
        act = partial(programs.run_case, {**program, **stage}, directory, Stage)
        problem = ranks.run_ranks(stage["size"], place, act)
        if problem is not None:
            return problem
    return None


def smaller(program: Program) -> Iterator[Program]:
    """Yield programs with a part less."""
    stages = program["stages"]
    for number, stage in enumerate(stages):
        before, after = stages[:number], stages[number + 1 :]
        if len(stages) > 1:
            yield {**program, "stages": [*before, *after]}
        for action in range(len(stage["loop"])):
            loop = stage["loop"][:action] + stage["loop"][action + 1 :]
            yield {**program, "stages": [*before, {**stage, "loop": loop}, *after]}
        for simpler in ({"otherwise": None}, {"size": 1}, {"alone": []}):
            if {**stage, **simpler} != stage:
                yield {**program, "stages": [*before, {**stage, **simpler}, *after]}
    yield from ranks.smaller(program)


RESHARDING = Kind("resharding", __doc__ or "", draw, run_case, smaller)


if __name__ == "__main__":
    sys.exit(run(RESHARDING, sys.argv[1:]))

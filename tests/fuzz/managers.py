"""Trains several models in one process, each by a manager of its own, as programs drawn from a seed say, plain and offloaded.

Usage: tools/fuzz managers [--minutes N] [--cases N] [--seed N] [--program JSON]

A program is two or three small models, as those of programs.py, and what is done with them: losses through several, teachers that
`swapper.load` reads, values that go from one to another, resuming, snapshots and failures of one while others train on.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from e2e.twins import assert_same
from infer.host_device import ORDERS
from torch import nn
from torch.nn import functional as F

import swapper
from fuzz import program_actions, programs
from fuzz.cases import Impossible, Kind, Program, outcome, run
from fuzz.program_layers import VOCABULARY
from fuzz.program_passes import BATCH, LENGTH, Side, Stop
from fuzz.programs import PLAIN, REFUSALS, RULES, Training, draw_layers, draw_options, is_ours, smaller_options

Sides = Sequence[Side]
Action = Callable[[Sides, random.Random], Any]


def batch() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH))


def step(side: Side) -> None:
    side.optimizer.step()
    side.optimizer.zero_grad()
    side.is_open = False


def finish(side: Side, loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    step(side)
    return loss.detach()


# --- training ---------------------------------------------------------------------------------------------------------


def train(sides: Sides, chance: random.Random) -> Any:
    side = chance.choice(sides)
    return finish(side, side.loss())


def train_interleaved(sides: Sides, chance: random.Random) -> Any:
    """Forwards and backwards of two models among each other."""
    one, other = chance.sample(sides, 2)
    losses = [one.loss(), other.loss()]
    pairs = list(zip((one, other), losses, strict=True))
    for _, loss in chance.sample(pairs, 2):
        loss.backward()
    for side, _ in chance.sample(pairs, 2):
        step(side)
    return [loss.detach() for loss in losses]


def joint(sides: Sides, chance: random.Random) -> Any:
    """One loss of all models, and a step of each."""
    loss = sum(side.loss() for side in sides)
    loss.backward()
    for side in chance.sample(sides, len(sides)):
        step(side)
    return loss.detach()


def through(sides: Sides, chance: random.Random) -> Any:
    """A loss of one model through another, which it trains too, or leaves as it is, as a generator's through a discriminator."""
    one, other = chance.sample(sides, 2)
    hidden = one.model(batch()).float().softmax(-1) @ other.model.embedding.weight
    for layer in other.model.layers:
        hidden = hidden + layer(hidden)
    logits = F.linear(hidden * other.model.scale, other.model.head.weight)
    loss = F.cross_entropy(logits.float().flatten(0, 1), batch().flatten())
    loss.backward()
    other.is_open = True
    for side in (one, other) if chance.random() < 0.5 else (one,):
        step(side)
    other.model.zero_grad()
    return loss.detach()


def distil(sides: Sides, chance: random.Random) -> Any:
    """One model learns what another says, which trains as well at times."""
    one, other = chance.sample(sides, 2)
    tokens = batch()
    other.is_open = True
    with torch.no_grad():
        target = other.model(tokens).float().softmax(-1)
    found = [finish(one, F.kl_div(one.model(tokens).float().log_softmax(-1), target, reduction="batchmean"))]
    return found + ([finish(other, other.loss())] if chance.random() < 0.5 else [])


def from_teacher(sides: Sides, chance: random.Random) -> Any:
    """One model learns what a loaded one says, at times in a thread meanwhile."""
    side, tokens, is_threaded = chance.choice(sides), batch(), chance.random() < 0.5
    teacher, found = side.kept["teacher"], []

    def ask() -> None:
        with torch.no_grad():
            found.append(teacher(tokens).float())

    if is_threaded:
        asking = threading.Thread(target=ask)
        asking.start()
        losses = [finish(side, side.loss())]
        asking.join()
    else:
        losses = []
        ask()
    target = found[0].softmax(-1)
    losses.append(finish(side, F.kl_div(side.model(tokens).float().log_softmax(-1), target, reduction="batchmean")))
    return [*losses, target]


def fail(sides: Sides, chance: random.Random) -> Any:
    """A forward of one model fails within a loss of two."""

    def stop(*_: object) -> None:
        raise Stop

    one, other = chance.sample(sides, 2)
    hook = chance.choice([*other.model.layers, other.model.head]).register_forward_hook(stop)
    loss = one.loss()
    try:
        other.loss()
    except Stop:
        hook.remove()
    return [finish(one, loss), finish(other, other.loss())]


# --- between steps ----------------------------------------------------------------------------------------------------


def follow(sides: Sides, chance: random.Random) -> Any:
    """Values of one model go to another: of all parameters that are alike, or of one."""
    one, other = chance.sample(sides, 2)
    theirs = dict(other.model.named_parameters())
    alike = [(p, theirs[n]) for n, p in one.model.named_parameters() if n in theirs and theirs[n].shape == p.shape]
    with torch.no_grad():
        for ours, its in alike if chance.random() < 0.5 else chance.sample(alike, 1):
            if chance.random() < 0.5:
                its.lerp_(ours.to(its.dtype), 0.1)
            else:
                its.copy_(ours)


def load_state(sides: Sides, chance: random.Random) -> Any:
    one, other = chance.sample(sides, 2)
    theirs = other.model.state_dict()
    state = {n: v for n, v in one.model.state_dict().items() if n in theirs and theirs[n].shape == v.shape}
    other.model.load_state_dict({n: v.to(theirs[n].dtype) for n, v in state.items()}, strict=False)


def gather_both(sides: Sides, chance: random.Random) -> Any:
    one, other = chance.sample(sides, 2)
    with (
        one.swapped(lambda: one.manager.gather(one.model.head)),
        other.swapped(lambda: other.manager.gather(other.model.head, write=True)),
        torch.no_grad(),
    ):
        other.model.head.weight.lerp_(one.model.head.weight, 0.5)


def one_of(name: str) -> Action:
    """Return an action of programs.py on one of the models."""

    def act(sides: Sides, chance: random.Random) -> Any:
        side = chance.choice(sides)
        side.chance = chance
        return program_actions.ACTIONS[name](side)

    return act


def new_teacher(sides: Sides, chance: random.Random) -> Any:
    """The teacher of one model is its present state from now on."""
    side = chance.choice(sides)
    side.kept["new teacher"](chance)


ACTIONS: dict[str, Action] = {
    "train": train,
    "train interleaved": train_interleaved,
    "joint": joint,
    "through": through,
    "distil": distil,
    "from teacher": from_teacher,
    "fail": fail,
    "follow": follow,
    "load state": load_state,
    "gather both": gather_both,
    "new teacher": new_teacher,
    **{
        name: one_of(name)
        for name in ("resume", "resume otherwise", "snapshot", "park", "evaluate", "read", "write", "save and load")
    },
}
LEFT_OUT = ("muon", "adafactor", "nadam", "asgd")
"""Optimizers that take matrices alone, or whose single numbers torch casts to the parameter's dtype as it loads them."""
WEIGHTS = [4, 3, 3, 3, 3, 3, 1, 1, 1, 1, 1, 2, 1, 2, 1, 1, 1, 1, 1]


class Family:
    """The models of a program."""

    def __init__(self, program: Program, directory: Path) -> None:
        self.program, self.directory = program, directory
        self.members: list[Training] = []
        for number, of in enumerate(program["models"]):
            place = directory / str(number)
            place.mkdir()
            self.members.append(Training({**PLAIN, **of, "loop": []}, place, None))

    def run(self) -> None:
        """Raises AssertionError where a model, or a result, is other than in plain torch."""
        for member in self.members:
            member.pair.offload()
            member._begin()
            self._teach(member)
        for number, (name, seed) in enumerate(self.program["loop"]):
            try:
                self._do(name, seed)
            except BaseException as error:
                error.args = (f"[{number} {name}] {error}", *error.args[1:])
                raise
        for member in self.members:
            member.finish()

    def _do(self, name: str, seed: int) -> None:
        results = []
        for sides in ([member.plain for member in self.members], [member.swapped for member in self.members]):
            torch.manual_seed(seed)
            try:
                results.append(ACTIONS[name](sides, random.Random(seed)))
            except Exception as error:
                if sides[0].manager is None and not is_ours(error):
                    raise Impossible(f"{type(error).__name__}: {error}") from error
                raise
        assert_same(*reversed(results))

    def _teach(self, member: Training) -> None:
        """Give a model's twins a teacher: its values of now, in memory, and loaded from a file or a snapshot."""
        for side in (member.plain, member.swapped):
            side.kept["new teacher"] = partial(self._set_teacher, member, side)
            side.kept["new teacher"](random.Random(self.program["seed"]))

    def _set_teacher(self, member: Training, side: Side, chance: random.Random) -> None:
        from_snapshot = chance.random() < 0.5
        if side.manager is None:
            teacher: nn.Module = member._model()
            teacher.load_state_dict(side.model.state_dict())
        else:
            if (before := side.kept.pop("teacher", None)) is not None:
                swapper.loaded(before).unload()
            path = member.directory / f"teacher-{chance.random()}.pt"
            if from_snapshot:
                side.manager.snapshot(path).wait()
            else:
                torch.save(side.model.state_dict(), path)
            teacher = swapper.load(member._model(), path, host_memory="8MiB")
        side.kept["teacher"] = teacher.requires_grad_(False).eval()


def draw(seed: str) -> Program:
    """Return the program of a seed."""
    chance = random.Random(seed)
    names = chance.choices(list(ACTIONS), WEIGHTS, k=chance.randint(2, 7))
    models = []
    for _ in range(chance.choice([2, 2, 3])):
        options = draw_options(chance)
        if {"through", "distil", "fail"} & {*names} and options["update"] == "backward":
            options["update"] = "step"
        if {"resume", "resume otherwise"} & {*names}:
            options["commit_every"] = 1
        if chance.random() < 0.2:
            options |= {"device": chance.choice(ORDERS), "update_on": chance.choice(["cpu", "device"])}
        models.append(
            {
                "seed": chance.randrange(1 << 30),
                "layers": draw_layers(chance, 3, ("max norm", "empty", "dropped", "compiled")),
                "tied": chance.random() < 0.3,
                "rule": chance.choice([name for name in RULES if name not in LEFT_OUT]),
                "options": options,
            }
        )
    return {
        "seed": chance.randrange(1 << 30),
        "models": models,
        "loop": [[name, chance.randrange(1000)] for name in names],
    }


def run_case(program: Program, directory: Path) -> str | None:
    """Return what went wrong, None if nothing did; REFUSED and why, if swapper or plain torch cannot do it."""
    return outcome(lambda: Family(program, directory).run(), REFUSALS)


def smaller(program: Program) -> Iterator[Program]:
    """Yield programs with a part less."""
    for number in range(len(program["loop"])):
        yield {**program, "loop": program["loop"][:number] + program["loop"][number + 1 :]}
    if len(program["models"]) > 2:
        yield from (
            {**program, "models": program["models"][:n] + program["models"][n + 1 :]}
            for n in range(len(program["models"]))
        )
    for number, model in enumerate(program["models"]):
        for less in (*programs.smaller({**PLAIN, "loop": [], **model}), *smaller_options(model)):
            kept = {name: less[name] for name in model}
            yield {**program, "models": [*program["models"][:number], kept, *program["models"][number + 1 :]]}


MANAGERS = Kind("managers", __doc__ or "", draw, run_case, smaller)


if __name__ == "__main__":
    sys.exit(run(MANAGERS, sys.argv[1:]))

"""Trains by loops of accelerate and of Lightning drawn from a seed, plain and offloaded, and compares them bit for bit.

Usage: tools/fuzz libraries [--minutes N] [--cases N] [--seed N] [--program JSON]

A program is a small model of program_layers.py, an optimizer, a schedule, arguments of the library, actions at its events, how the
training ends and goes on, or what follows it, and options of `offload`; some loops of accelerate are of two ranks, by DDP.
Losses, norms, metrics, checkpoints, parameters and optimizer states must be those of the plain one.
Losses, norms, metrics, checkpoints, parameters and optimizer states must be those of the plain one.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from infer.host_device import ORDERS

from fuzz import accelerate_loops, lightning_loops
from fuzz.accelerate_loops import ACTIONS_OF_ACCELERATE, AccelerateLoop
from fuzz.cases import Impossible, Kind, Program, assert_like, end_within, outcome, run
from fuzz.library_parts import BEFORE_STEP, READS, SETTINGS, WRITES, LibraryLoop
from fuzz.lightning_loops import LightningLoop
from fuzz.programs import REFUSALS, RULES, draw_layers, draw_options, forbidden_to, is_ours, smaller_options
from fuzz.ranks import impossible_for, of_ddp, run_parts

LOOPS: dict[str, type[LibraryLoop]] = {"accelerate": AccelerateLoop, "lightning": LightningLoop}
DEFAULTS: dict[str, dict[str, Any]] = {
    "accelerate": {name: values[0] for name, values in accelerate_loops.ARGUMENTS.items()},
    "lightning": {
        "max_epochs": 2,
        "lines": 7,
        "schedule": "steps",
        "interval": "step",
        "frequency": 1,
        "optimization": "automatic",
        "whole": True,
        "callbacks": [],
    },
}
AFTER = ("validate", "test", "predict", "save", "from a checkpoint")


def draw_accelerate(chance: random.Random, options: dict[str, Any]) -> dict[str, Any]:
    """Return what a loop calls accelerate with."""
    found = {name: chance.choice(values) for name, values in accelerate_loops.ARGUMENTS.items()}
    if options["update"] == "backward":
        found["clip"] = None
        if found["how"] == "accumulate":
            found["accumulation"] = 1
    return found


def draw_lightning(chance: random.Random, options: dict[str, Any]) -> dict[str, Any]:
    """Return a Trainer's arguments, and what its module does."""
    some = {name: chance.choice(values) for name, values in lightning_loops.ARGUMENTS.items() if chance.random() < 0.2}
    own = {name: chance.choice(values) for name, values in lightning_loops.OWN.items()}
    own["callbacks"] = chance.sample(lightning_loops.OWN["callbacks"], chance.choice([0, 1, 2]))
    found = {**DEFAULTS["lightning"], **some, **own}
    if options["update"] == "backward" or found["optimization"] != "automatic":
        for name in ("gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches"):
            found.pop(name, None)
    if options["update"] == "backward" or found["optimization"] != "automatic" or "accumulate_grad_batches" in found:
        found["callbacks"] = [name for name in found["callbacks"] if name != "accumulation"]
    if "barebones" in found:
        found["callbacks"] = []
        for name in ("limit_val_batches", "val_check_interval", "num_sanity_val_steps", "log_every_n_steps"):
            found.pop(name, None)
        found.pop("detect_anomaly", None)
    return found


def draw_actions(chance: random.Random, library: str, forbidden: set[str], ends: bool) -> list[list[Any]]:
    """Return actions at events of steps. Of a training that ends, what is done between would be done again: it reads alone."""
    between = [*READS[:3], *READS, *SETTINGS, *WRITES] if not ends else list(READS[:3])
    if library == "accelerate":
        between += [n for n in ACTIONS_OF_ACCELERATE if not ends or n != "load state"] * 2
        groups = dict.fromkeys(("batch", "after step", "epoch end"), between)
        groups |= {event: list(BEFORE_STEP) for event in ("after backward", "before step")}
    else:
        kinds = {"gradients": list(BEFORE_STEP), "reads": list(READS), "reads and writes": between}
        groups = {event: kinds[kind] for event, kind in lightning_loops.EVENTS.items()}
    actions = []
    for _ in range(chance.choice([0, 1, 2, 4])):
        event = chance.choice(list(groups))
        allowed = [name for name in groups[event] if name not in forbidden]
        if allowed and not (ends and groups[event][0] in BEFORE_STEP):
            actions.append([event, chance.randint(0, 6), chance.choice(allowed), chance.randrange(1 << 16)])
    return actions


def draw(seed: str) -> Program:
    """Return the program of a seed."""
    chance = random.Random(seed)
    library = chance.choice(list(LOOPS))
    size = chance.choice([1, 2]) if library == "accelerate" else 1
    impossible = impossible_for("ddp") if size > 1 else set()
    layers = draw_layers(chance, 4, impossible)
    options = draw_options(chance)
    if chance.random() < 0.25:
        options |= {"device": chance.choice(ORDERS), "update_on": chance.choice(["cpu", "device"])}
    if size > 1:
        options = of_ddp(chance, options)
    rule = chance.choice([name for name in RULES if name not in ("muon", "adafactor")])
    end = chance.choice([None, "interrupted", "killed"]) if library == "accelerate" else None
    arguments = (draw_accelerate if library == "accelerate" else draw_lightning)(chance, options)
    if size > 1 and arguments["how"] == "together":
        arguments["how"] = "plain"
    if end is not None:  # which layers had gradients of zeros, and how often loaders were shuffled, is in no commit
        arguments |= {"zero": "after", "seedable": True}
    if "bf16-mixed" in arguments.values() or "bf16" in arguments.values():
        # With a hook of anybody's torch evaluates these otherwise under autocast on the CPU.
        layers = [layer.replace("encoder", "linear") for layer in layers]
    forbidden = forbidden_to(options, layers, [rule], master=False) | impossible
    return {
        "seed": chance.randrange(1 << 30),
        "size": size,
        "library": library,
        "layers": layers,
        "tied": chance.random() < 0.3,
        "rule": rule,
        "arguments": arguments,
        "actions": [
            action
            for action in draw_actions(chance, library, forbidden, end is not None)
            if arguments.get("how") != "together" or action[0] != "after backward"  # which they have no event after
        ],
        "end": end and [end, chance.choice(["batch", "before step", "after step"]), chance.randint(1, 6)],
        "after": chance.sample(AFTER, chance.choice([0, 1, 2])) if library == "lightning" else [],
        "options": options,
    }


def run_plain(plain: LibraryLoop) -> None:
    """Raises Impossible: the library cannot do it."""
    try:
        plain.run()
    except Exception as error:
        if is_ours(error):
            raise
        raise Impossible(f"{type(error).__name__}: {error}") from error


def begin(program: Program, directory: Path, end: Callable[[], object]) -> None:
    """Begin the offloaded one, which calls `end` at its place."""
    _, event, step = program["end"]
    begun = LOOPS[program["library"]](program, directory / "ours", is_offloaded=True)
    begun.end = (event, step, end)
    try:
        begun.run()
    finally:
        if begun.manager is not None:
            begun.manager.close()


def begin_and_be_killed(program: Program, directory: Path) -> None:
    run_plain(LOOPS[program["library"]](program, directory / "tried", is_offloaded=False))
    begin(program, directory, partial(os.kill, os.getpid(), signal.SIGKILL))


def run_both(program: Program, directory: Path, has_ended: bool = False) -> None:
    """Raises AssertionError where the offloaded one does other than the plain one. `has_ended`: that has begun before."""
    kind = LOOPS[program["library"]]
    plain, ours = (kind(program, directory / name, name == "ours") for name in ("plain", "ours"))
    run_plain(plain)
    if program["end"] is not None and not has_ended:
        end_within(partial(begin, program, directory), program["end"][0], directory / "answer", REFUSALS)
    ours.run()
    compare(ours, plain)
    ours.manager.close()


def compare(ours: LibraryLoop, plain: LibraryLoop) -> None:
    """Raises AssertionError where they differ."""
    results = [[result for result in loop.results if result[0] > ours.begun] for loop in (ours, plain)]
    assert_like([r[:3] for r in results[0]], [r[:3] for r in results[1]], "what was done")
    for found, expected in zip(*results, strict=True):
        assert_like(found, expected, str(expected[:3]))
    assert_like(ours.found, plain.found, "found")


def run_case(program: Program, directory: Path) -> str | None:
    """Return what went wrong, None if nothing did; REFUSED and why, if swapper or a library cannot do it."""
    if program["size"] == 1:
        return outcome(lambda: run_both(program, directory), REFUSALS)
    is_killed = program["end"] is not None and program["end"][0] == "killed"
    parts = [partial(begin_and_be_killed, program, directory)] if is_killed else []
    return run_parts(program["size"], directory, [*parts, partial(run_both, program, directory, has_ended=is_killed)])


def smaller(program: Program) -> Iterator[Program]:
    """Yield programs with a part less."""
    for name in ("actions", "after", "layers"):
        for number in range(len(program[name])):
            yield {**program, name: program[name][:number] + program[name][number + 1 :]}
    defaults = DEFAULTS[program["library"]]
    for name, value in program["arguments"].items():
        left = {n: v for n, v in program["arguments"].items() if n != name}
        if name not in defaults:
            yield {**program, "arguments": left}
        elif value != defaults[name]:
            yield {**program, "arguments": {**program["arguments"], name: defaults[name]}}
    plain = {"size": 1, "tied": False, "rule": "adamw", "end": None}
    yield from ({**program, name: value} for name, value in plain.items() if program[name] != value)
    for number, layer in enumerate(program["layers"]):
        if layer != "linear":
            yield {**program, "layers": [*program["layers"][:number], "linear", *program["layers"][number + 1 :]]}
    yield from smaller_options(program)


LIBRARIES = Kind("libraries", __doc__ or "", draw, run_case, smaller)


if __name__ == "__main__":
    sys.exit(run(LIBRARIES, sys.argv[1:]))

"""Trains programs drawn from a seed, by plain torch and offloaded, and compares them bit for bit.

Usage: tools/fuzz programs [--minutes N] [--cases N] [--seed N] [--program JSON]

A program is a small model, an optimizer, options of `offload` and a loop, of the ingredients of program_layers.py and
program_actions.py. Each runs in a process of its own. A difference, an error that is not one of swapper's refusals, a crash or a
hang is a failure: it is made smaller, and printed as JSON that `--program` repeats.
"""

from __future__ import annotations

import random
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from e2e.early import sealed
from e2e.keywords import for_offload
from e2e.optimizers import OPTIMIZERS
from e2e.racing_loops import Drive
from e2e.several import Several, SeveralTwins, by_turns, muon_and_adamw
from e2e.twins import Twins, smallest_device_budget
from infer.host_device import ORDERS, HostDevice
from torch.optim import SGD, Adamax, Muon, RAdam, RMSprop

import swapper
from fuzz.cases import Impossible, Kind, Program, outcome, run
from fuzz.loads import FILES
from fuzz.program_actions import (
    ACTIONS,
    BEFORE_STEP,
    BETWEEN,
    FORBIDDEN,
    STEPS,
)
from fuzz.program_layers import LAYERS, WRAPPERS, Model
from fuzz.program_passes import PASSES, Action, Side
from swapper.errors import BudgetError, ConfigError, StateError, UnsupportedError

RULES = OPTIMIZERS | {
    "rmsprop": partial(RMSprop, lr=1e-3, momentum=0.5),
    "sgd nesterov": partial(SGD, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd": partial(SGD, lr=1e-2),
    "adamax": partial(Adamax, lr=1e-3),
    "radam": partial(RAdam, lr=1e-3),
    "muon": partial(Muon, lr=1e-3),
}
PLAIN = {
    "tied": False,
    "rule": "adamw",
    "more_rules": [],
    "groups": "all",
    "master": False,
    "drives": 1,
    "hurries": None,
    "init": None,
}
PLAIN_OPTIONS: dict[str, Any] = {
    "update": "step",
    "params": "nvme",
    "optimizer_state": "nvme",
    "gradients": "auto",
    "room_bytes": 1 << 20,
    "commit_every": "free",
}
"""What a smaller program has, where it fails so too."""
BUILT: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "on meta": lambda: torch.device("meta"),
    "without weights": swapper.without_weights,
    "with other values": nullcontext,
}
"""How a model is built whose values are a checkpoint's."""
GROUPS = ("all", "decay", "reversed", "by layer", "with frozen", "last ones later")


def grouped(model: Model, rule: str, kind: str) -> list[dict[str, Any]]:
    """Return param groups. Of those "last ones later" leaves some parameters out; they are frozen."""
    given = list(model.parameters())
    if kind == "last ones later":
        for parameter in model.head.parameters():
            parameter.requires_grad_(False)
    if kind != "with frozen":
        given = [p for p in given if p.requires_grad]
    if rule == "muon":
        given = [p for p in given if p.dim() == 2]
    if kind == "decay":
        matrices, others = [p for p in given if p.dim() > 1], [p for p in given if p.dim() <= 1]
        return [{"params": matrices, "weight_decay": 0.1}, {"params": others}] if others else [{"params": matrices}]
    if kind == "by layer":
        return [{"params": given[n : n + 5], "lr": 1e-3 / (n + 1)} for n in range(0, len(given), 5)]
    return [{"params": given[::-1] if kind == "reversed" else given}]


def draw_layers(chance: random.Random, most: int, not_these: Collection[str] = ()) -> list[str]:
    """Return layers, one to `most`, of kinds and wrappers that are not among `not_these`."""
    kinds, wrappers = ([name for name in names if name not in not_these] for names in (LAYERS, WRAPPERS))
    layers = []
    for _ in range(chance.randint(1, most)):
        around = chance.choices(wrappers, k=chance.choice([0, 0, 0, 1, 1, 2]))
        layers.append("+".join([*around, chance.choice(kinds)]) if chance.random() < 0.92 else "again")
    return layers


def draw_options(chance: random.Random) -> dict[str, Any]:
    """Return options of `offload`, without a device."""
    return {
        "update": chance.choice(["step", "deferred", "backward"]),
        "params": chance.choice(["nvme", "nvme", "host", "auto"]),
        "optimizer_state": chance.choice(["nvme", "nvme", "host", "auto"]),
        "gradients": chance.choice(["auto", "auto", "host", "nvme"]),
        "room_bytes": chance.choice([0, 1 << 18, 1 << 20, 64 << 20]),
        "commit_every": chance.choice(["free", "free", 1, 2, None]),
    }


def for_a_manager(options: dict[str, Any]) -> tuple[dict[str, Any], swapper.CommitPolicy, int]:
    """Return what `offload` is given of a program's options, its policy of commits, and the bytes beyond the smallest budget."""
    given = dict(options)
    commits, room_bytes = swapper.CommitPolicy(every=given.pop("commit_every")), given.pop("room_bytes")
    order, place = given.pop("device", None), given.pop("update_on", None)
    if order is not None:
        given |= {"device": HostDevice(order), "accelerator": swapper.Accelerator(update_on=place)}
    return given, commits, room_bytes


def forbidden_to(options: dict[str, Any], layers: Sequence[str], rules: Sequence[str], master: bool) -> set[str]:
    """Return the actions that do not go with what was drawn."""
    in_nvme = options["params"] == options["optimizer_state"] == "nvme" and "device" not in options
    has = {
        "masters": master,
        "several": len(rules) > 1,
        "backward": options["update"] == "backward",
        "gradients without data": options["gradients"] == "nvme" or "device" in options,
        "device": "device" in options,
        **{kind: any(kind in layer for layer in layers) for kind in ("reentrant", "empty", "lstm", "max norm")},
        "cast": bool({"nadam", "asgd"} & {*rules}) and any("bf16" in each or "in double" in each for each in layers),
        "no commits": options["commit_every"] != 1 and not (in_nvme and options["commit_every"] == "free"),
    }
    return set().union(*(FORBIDDEN[name] for name, is_so in has.items() if is_so))


def draw_some(chance: random.Random, actions: Iterable[str], forbidden: Collection[str], count: int) -> list[list[Any]]:
    """Return actions, each with the seed of its own chance."""
    allowed = [name for name in actions if name not in forbidden]
    return [[chance.choice(allowed), chance.randrange(1000)] for _ in range(count if allowed else 0)]


def draw_hurries(chance: random.Random) -> float | None:
    """Return how often a drive that is late or early ends all that is under way at once; None: the drive as it is."""
    return chance.choice([0, 0.1, 0.5, 1]) if chance.random() < 0.4 else None


def draw(seed: str) -> Program:
    """Return the program of a seed."""
    chance = random.Random(seed)
    layers = draw_layers(chance, 5)
    options = draw_options(chance)
    if chance.random() < 0.25:
        options |= {"device": chance.choice(ORDERS), "update_on": chance.choice(["cpu", "device"])}
        if options["update_on"] == "device":
            options["gradients"] = chance.choice(["host", "auto", "device"])
    rule = chance.choice(list(RULES))
    rule = "adamw" if rule == "adafactor" and any("empty" in layer for layer in layers) else rule
    # Others for a part of the parameters, dealt in turn; of Muon's, AdamW for all but the matrices.
    others = [name for name in RULES if name not in ("muon", "adafactor")]
    more = chance.sample(others, chance.choice([1, 2])) if chance.random() < 0.2 else []
    master = chance.random() < 0.2 and rule != "muon" and not any("max norm" in layer for layer in layers)
    some = partial(draw_some, chance, forbidden=forbidden_to(options, layers, [rule, *more], master))
    if master and options.get("update_on") != "device":
        options["state_codec"] = chance.choice(["exact", "split"])

    loop = []
    for _ in range(chance.randint(2, 4)):
        passes = (
            some(PASSES, count=chance.choice([1, 1, 1, 2]))
            if chance.random() < 0.7
            else [["ordinary", chance.randrange(1000)]]
        )
        loop += [*passes, *some(BEFORE_STEP, count=chance.choice([0, 0, 1, 2]))]
        loop += some(STEPS, count=1) if chance.random() < 0.3 else [["step", 0]]
        loop += [["zero", 0]] * (chance.random() < 0.7) + some(BETWEEN, count=chance.choice([0, 1, 1, 2, 3]))
    return {
        "seed": chance.randrange(1 << 30),
        "layers": layers,
        "tied": chance.random() < 0.3,
        "rule": rule,
        "more_rules": more,
        "groups": "all" if master or more else chance.choice(GROUPS),
        "master": master,
        "drives": chance.choice([1, 1, 1, 2, 3]),
        "hurries": draw_hurries(chance),
        "init": draw_init(chance, layers, list(FILES)),
        "options": options,
        "loop": loop,
    }


def draw_init(chance: random.Random, layers: Sequence[str], files: Sequence[str]) -> list[str] | None:
    """Return a kind of checkpoint and how a model is built that gets its values; None: it has values."""
    keeps_some = any("lazy" in layer for layer in layers)  # those get values when they are built
    return [chance.choice(files), chance.choice(list(BUILT))] if chance.random() < 0.25 and not keeps_some else None


def is_ours(error: Exception) -> bool:
    """Return whether it is a mistake in the code of the fuzzer itself; torch's errors are others."""
    *_, last = traceback.extract_tb(error.__traceback__)
    is_mistake = isinstance(error, TypeError | NameError | AttributeError | LookupError)
    return is_mistake and Path(last.filename).parent == Path(__file__).parent


class Training:
    """The twins of a program."""

    passes: ClassVar[dict[str, Action]] = PASSES
    actions: ClassVar[dict[str, Action]] = ACTIONS
    resume_as = "auto"
    rank = 0

    def __init__(self, program: Program, directory: Path, drive: Drive | None) -> None:
        self.program = program
        self.directory = directory
        options = dict(program["options"])
        device = options.pop("device", None)
        drives = [directory / "run", *(directory / f"drive-{number}" for number in range(1, program["drives"]))]
        self.probe = directory / "probe"  # where smallest budgets are found
        for place in (*drives, self.probe):
            place.mkdir(exist_ok=True)
        self.pair = pair = self._make_pair(drives[0], others=drives[1:], wait=True, **options)
        pair.swapped = self._model() if program["init"] is None else self._model_from_file(*program["init"])
        pair.original = self._optimizer(self._select(pair.swapped))
        if device is not None:
            pair.options |= self._device(device)
        self.plain = Side(pair.plain, pair.plain_optimizer, None, lambda *_: None, directory)
        self.swapped = Side(pair.swapped, pair.optimizer, None, self._rebuild, directory)
        if drive is not None:
            self.swapped.watch = drive.watch

    def _make_pair(self, directory: Path, **options: Any) -> Twins:
        """Return the twins, of which the plain one is there."""
        model = self._model()
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()  # as they are from `offload` on
        twins = SeveralTwins if self.program["more_rules"] else Twins
        return twins(directory, model, self._optimizer, master=self.program["master"], select=self._select, **options)

    def _device(self, order: str) -> dict[str, Any]:
        """Return the options of a device of host memory where copies arrive in this order, with little memory."""
        pair, device = self.pair, HostDevice(order)
        needed = smallest_device_budget(self.probe, pair.swapped, pair.original, **pair.options, device=device)
        return {"device": device, "device_memory": needed + (2 << 20)}

    def _model(self) -> Model:
        torch.manual_seed(self.program["seed"])
        model = Model(self.program["layers"], self.program["tied"])
        return model.bfloat16() if self.program["master"] else model

    @torch.no_grad()
    def _model_from_file(self, file: str, built: str) -> Model:
        """Return a model of which a checkpoint of this kind has the values, which are the plain one's, also of buffers."""
        values = Training._model(self)
        stored = values.state_dict()
        for model in (values, self.pair.plain):
            for name, buffer in model.named_buffers():
                if name in stored and buffer.is_floating_point():
                    buffer.add_(0.125)
        self.pair.init = FILES[file](values, Path(tempfile.mkdtemp(dir=self.directory)))
        with BUILT[built]():
            found = self._model()
        for parameter in found.parameters() if built == "with other values" else ():
            parameter.mul_(2)
        return found

    def _optimizer(self, groups: Any) -> Any:
        rules = [self.program["rule"], *self.program["more_rules"]]
        if len(rules) == 1:
            return RULES[rules[0]](groups)
        if len(groups) < len(rules):
            raise Impossible("fewer parameters than optimizers")
        if rules[0] == "muon":
            return muon_and_adamw(groups)
        return by_turns(lambda parameters, number: RULES[rules[number]](parameters), len(rules))(groups)

    def _select(self, model: Any) -> Any:
        rule = "adamw" if self.program["more_rules"] else self.program["rule"]  # else Muon gets no others
        groups = grouped(model, rule, self.program["groups"])
        return [p for group in groups for p in group["params"]] if self.program["groups"] == "all" else groups

    def run(self) -> None:
        """Raises AssertionError where they differ."""
        self.pair.offload()
        self._begin()
        self.go_on()
        self.finish()

    def _begin(self) -> None:
        """Take what the swapped one has now."""
        pair, side = self.pair, self.swapped
        side.model, side.optimizer, side.manager = pair.swapped, pair.optimizer, pair.manager

    def go_on(self, first: int = 0, after_each: Callable[[], object] = lambda: None) -> None:
        """Do the loop's actions from this one on."""
        for number, (name, _) in enumerate(self.program["loop"][first:], first):
            try:
                self.pair.both(partial(self.do, number))
            except BaseException as error:
                error.args = (f"[{number} {name}] {error}", *error.args[1:])
                raise
            after_each()

    def do(self, number: int, model: Any, _: Any) -> Any:
        """Do an action of the loop with one of the twins."""
        loop = self.program["loop"]
        name, seed = loop[number]
        following = [other for other, _ in loop[number + 1 :] if other in {**self.passes, **STEPS}]
        side = self.plain if model is self.plain.model else self.swapped
        side.chance = random.Random(seed)
        torch.manual_seed(self.program["seed"] + 64 * seed + self.rank)
        side.is_last = not following or (following[0] not in self.passes and following[0] not in ("closure", "scaled"))
        if name in self.passes or name in STEPS:
            side.is_open = name in self.passes or name == "skip"
        try:
            return self.act(side, name)
        except Exception as error:
            if side is self.plain and not is_ours(error):
                raise Impossible(f"{type(error).__name__}: {error}") from error
            raise

    def finish(self) -> None:
        """Compare both, and close the run."""
        if sealed(self.pair.manager.current.run.model.groups):
            # Updated in backward: the step is taken before both are compared.
            self.pair.both(lambda _, optimizer: optimizer.step())
        self.compare()
        self.pair.check_pager()
        self.pair.close()

    def compare(self) -> None:
        """Compare all that they have."""
        pair = self.pair
        pair.assert_same_parameters()
        pair.assert_same_state()
        pair.assert_same_buffers()

    def act(self, side: Side, name: str) -> Any:
        return self.actions[name](side)

    def layout(self) -> dict[str, Any]:
        """Return the names of each param group's parameters, and whether each parameter has gradients."""
        pair = self.pair
        names = {id(p): name for name, p in pair.swapped.named_parameters()}
        return {
            "groups": [[names[id(p)] for p in group["params"]] for group in pair.optimizer.param_groups],
            "trained": {name: p.requires_grad for name, p in pair.swapped.named_parameters()},
        }

    def _rebuild(self, chance: random.Random | None = None) -> None:
        """Go on in another model, as in another process; with `chance` with other options."""
        pair, layout = self.pair, self.layout()
        step, budget = pair.manager.step, pair.manager._options.host_bytes
        pair.close()
        self.resume(layout, budget, chance)
        assert pair.manager.step == step, f"step {pair.manager.step} of {step} was committed"

    def resume(self, layout: dict[str, Any], budget: int, chance: random.Random | None = None) -> None:
        """Go on with a run that had this layout; with `chance` with other options."""
        pair, trained = self.pair, layout["trained"]
        pair.swapped = self._model()
        pair.original = self._optimizer(self._select(pair.swapped))
        for group in layout["groups"][len(pair.original.param_groups) :]:
            pair.original.add_param_group({"params": [pair.swapped.get_parameter(name) for name in group]})
        grouped_ids = {id(p) for group in pair.original.param_groups for p in group["params"]}
        for name, parameter in pair.swapped.named_parameters():
            if id(parameter) in grouped_ids:  # the layout of a run says of others whether they have gradients
                parameter.requires_grad_(trained[name])
        if chance is not None:
            budget = self._other_options(chance)
        commits = swapper.CommitPolicy(every=pair.commit_every)
        directories = [pair.directory, *pair.others]
        pair.manager = swapper.SwapManager(
            directories, host_memory=budget, resume=self.resume_as, commits=commits, backend=pair.backend
        )
        _, optimizer = pair.manager.offload(pair.swapped, pair.original, **for_offload(pair.options))
        for name, parameter in pair.swapped.named_parameters():
            parameter.requires_grad_(trained[name])
        pair.optimizer = Several(optimizer) if self.program["more_rules"] else optimizer
        self._begin()

    def _other_options(self, chance: random.Random) -> int:
        """Give a run that goes on other options, which later actions go with too. Returns its budget."""
        pair = self.pair
        if chance.random() < 0.5:
            pair.options |= {"params": "auto", "optimizer_state": "auto"}  # what the run has
        if pair.options["update"] != "backward":
            pair.options["update"] = chance.choice(["step", "deferred"])
        if pair.options.get("gradients") == "nvme":
            pair.options["gradients"] = chance.choice(["nvme", "host"])
        return pair.smallest_budget(self.probe) + chance.choice([1 << 18, 1 << 21, 64 << 20])


REFUSALS = (BudgetError, ConfigError, StateError, UnsupportedError)


def run_case(program: Program, directory: Path, kind: type[Training] = Training) -> str | None:
    """Return what went wrong, None if nothing did; REFUSED and why, if swapper or what it is compared with cannot do it."""
    hurries = program["hurries"]
    drive = None if hurries is None else Drive(program["seed"], hurries)
    with nullcontext() if drive is None else drive.in_use():
        return outcome(lambda: kind(program, directory, drive).run(), REFUSALS)


def smaller(program: Program) -> Iterator[Program]:
    """Yield programs with a part less."""
    for name in ("loop", "layers"):
        for number in range(len(program[name])):
            yield {**program, name: program[name][:number] + program[name][number + 1 :]}
    for number, layer in enumerate(program["layers"]):
        simpler = [layer.split("+", 1)[1]] if "+" in layer else ["linear"] if layer != "linear" else []
        for one in simpler:
            yield {**program, "layers": [*program["layers"][:number], one, *program["layers"][number + 1 :]]}
    yield from ({**program, name: value} for name, value in PLAIN.items() if program[name] != value)
    yield from smaller_options(program)


def smaller_options(program: Program) -> Iterator[Program]:
    """Yield programs with simpler options of `offload`."""
    for name, value in PLAIN_OPTIONS.items():
        if program["options"][name] != value:
            yield {**program, "options": {**program["options"], name: value}}
    if "device" in program["options"]:
        left = {name: value for name, value in program["options"].items() if name not in ("device", "update_on")}
        yield {**program, "options": left}


PROGRAMS = Kind("programs", __doc__ or "", draw, run_case, smaller)


if __name__ == "__main__":
    sys.exit(run(PROGRAMS, sys.argv[1:]))

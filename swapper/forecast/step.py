"""Predicts the step of a plan, and finds the fastest setting of a session within its budget.

What is chosen is a plan that was predicted, so `offload` does what was compared. The computing is measured once: a placement and
the time of an update do not change it, only a codec changes the update.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from swapper.errors import BudgetError, ConfigError, UnsupportedError
from swapper.forecast.accelerator import DeviceClocks, DeviceRates
from swapper.forecast.compute import ComputeTimes, measure_step, with_updates
from swapper.io.drives import Tuning
from swapper.paging.virtual_drive import DriveRates
from swapper.runtime.sizes import parse_bytes_a_second
from swapper.runtime.stats import StepStats
from swapper.train.planning.planned_step import PlannedStep

PlanT = TypeVar("PlanT", bound=PlannedStep)
Rates = tuple[int | str | None, int | str | None]
"""Of reads and writes, as a user gives them."""
PLACEMENTS = (("host", "host"), ("host", "nvme"), ("nvme", "nvme"))
PLACED = ("params", "optimizer_state")
"""Places of these."""
SAME = 0.01
"""Settings whose steps differ by less than this part count as equally fast: the first in the order above is chosen."""


def predict(
    plan: PlannedStep, tokens: int, example: Sequence[object] | Mapping[str, object] | None, rates: Rates
) -> tuple[StepStats, int | None]:
    """Return the predicted step of a plan, and the peak bytes of what the model makes. See `Plan.predict`."""
    drive = drive_of(plan, tokens, rates)
    return predict_on(plan, drive, measure_step(plan, tokens, example), device_of(plan))


def predict_on(
    plan: PlannedStep, drive: DriveRates, compute: ComputeTimes, device: DeviceRates | None = None
) -> tuple[StepStats, int | None]:
    """Predict as `predict`, on a drive and an accelerator with these rates, and with this computing."""
    step = simulate(plan, drive, compute, device=device)
    better = {
        "a drive twice as fast": simulate(plan, drive.faster(2), compute, device=device),
        "a processor twice as fast": simulate(plan, drive, compute.faster(2), device=device),
    }
    if device is None:
        budget = replace(plan.budget, frame_count=2 * plan.budget.frame_count)
        better["twice the pool"] = simulate(replace(plan, budget=budget), drive, compute)
    else:
        better["a link twice as fast"] = simulate(plan, drive, compute, device=replace(device, link=2 * device.link))
    savings = {what: step.wall_s - other.wall_s for what, other in better.items()}
    return replace(step, savings=savings), compute.activation_bytes


def simulate(
    plan: PlannedStep,
    drive: DriveRates,
    compute: ComputeTimes,
    passes: int = 1,
    device: DeviceRates | None = None,
    clipped: bool = False,
) -> StepStats:
    """Return how a step of a plan goes.

    Args:
        drive: its rates.
        compute: the seconds of one forward and backward, and of updates.
        passes: forwards and backwards in a step, whose gradients accumulate.
        device: rates of the plan's accelerator, if it has one.
        clipped: there, gradients are clipped by the norm of all.

    Raises:
        BudgetError: the pool has too few frames for the step.
    """
    virtual = drive.open(compute.paging)
    if plan.request.device is None:
        return plan.dry_run(virtual, compute.with_copied(plan.placed_grad_plans).of, passes).time()
    dry = plan.dry_run(virtual, passes=passes)
    dry.device = DeviceClocks(plan, device or DeviceRates(), compute, virtual, passes, clipped)
    return dry.time()


def device_of(plan: PlannedStep) -> DeviceRates | None:
    """Return the measured rates of a plan's accelerator; None: there is none."""
    return None if plan.request.device is None else DeviceRates.measured(plan.request.device.device)


def drive_of(plan: PlannedStep, tokens: int, rates: Rates) -> DriveRates:
    """Return the rates of a plan's drive, and check the tokens. Raises ConfigError: see `Plan.predict`."""
    if type(tokens) is not int or tokens < 1:
        raise ConfigError(f"predict(tokens={tokens!r}): give the number of tokens of a step, of all samples together")
    if plan.request.device is not None and set(plan.places.values()) == {"host"} and rates == (None, None):
        return DriveRates()
    return drive_rates(plan.tuning, rates)


def drive_rates(tuning: Tuning | None, rates: Rates) -> DriveRates:
    """Return the rates of a drive, given or measured by `swapper tune`. Raises ConfigError if they are not known."""
    if tuning is not None and rates == (None, None):
        return DriveRates.measured(tuning)
    known = {} if tuning is None else {"read": tuning.read_bytes_per_s, "write": tuning.write_bytes_per_s}
    for name, given in zip(("read", "write"), rates, strict=True):
        if given is not None:
            known[name] = float(parse_bytes_a_second(given, f"drive_{name}"))
        elif name not in known:
            raise ConfigError(
                f"the drive's speed is not known: run `swapper tune DIR`, or give predict(..., drive_{name}='7GB'), "
                "its bytes a second"
            )
    both = known["read"] + known["write"]
    return DriveRates(**known, both=both, slowing_byte_s=0.0 if tuning is None else tuning.slowing_byte_s)


def choose_fastest(
    plan_for: Callable[..., PlanT],
    given: Mapping[str, object],
    codecs: Sequence[object],
    updates: Sequence[str],
    tokens: int,
    example: Sequence[object] | Mapping[str, object] | None,
    rates: Rates,
) -> PlanT:
    """Return the plan with the shortest predicted step, which says what else was tried.

    Args:
        plan_for: returns the plan with these options.
        given: options that the user has chosen.
        codecs, updates: codecs of the state, and times of the update, that the user allows.
        tokens, example, rates: see `Plan.predict`.

    Raises:
        BudgetError: no combination fits; of the one that needs least.
        ConfigError: a codec is unknown, or the drive's speed is not known.
    """
    for name, allowed in (("state_codecs", codecs), ("updates", updates)):
        if isinstance(allowed, str) or not allowed:
            raise ConfigError(f"{name}={allowed!r}: give a list, as state_codecs=['exact', '8bit'], updates=['step']")
    refusals: list[BudgetError | UnsupportedError] = []
    found: list[tuple[float, str, PlanT, DriveRates, ComputeTimes]] = []
    computing: dict[str, ComputeTimes] = {}
    device: DeviceRates | None = None
    for options in _combinations(given, codecs, updates):
        try:
            plan = plan_for(**options)
        except (BudgetError, UnsupportedError) as error:
            refusals.append(error)
            continue
        codec, drive, device = repr(options["state_codec"]), drive_of(plan, tokens, rates), device or device_of(plan)
        if codec not in computing:  # the forward and the backward are the same for each
            known = next(iter(computing.values()), None)
            computing[codec] = measure_step(plan, tokens, example) if known is None else with_updates(known, plan)
        compute = computing[codec]
        found.append((simulate(plan, drive, compute, device=device).wall_s, _describe(plan), plan, drive, compute))
    if not found:
        raise refusals[-1]
    min_s = min(seconds for seconds, *_ in found)
    seconds, words, plan, drive, compute = next(one for one in found if one[0] <= min_s * (1 + SAME))
    plan.found.step, plan.found.activation_bytes = predict_on(plan, drive, compute, device)
    others = sorted((other_s, name) for other_s, name, *_ in found if name != words)
    next_best = f"; next {others[0][1]}, {others[0][0]:.3f} s" if others else ""
    slowest = f"; slowest {others[-1][1]}, {others[-1][0]:.3f} s" if len(others) > 1 else ""
    refused = f"; {len(refusals)} do not fit or are refused" if refusals else ""
    rank = "the fastest" if seconds == min_s else f"the simplest within {SAME:.0%} of the fastest"
    plan.found.why = f"{words}, {seconds:.3f} s: {rank} of {len(found)}{next_best}{slowest}{refused}"
    return plan


def _combinations(given: Mapping[str, Any], codecs: Sequence[Any], updates: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield options: all of `given`, and of the others each combination, the first codec and update first."""
    places = [
        place
        for place in PLACEMENTS
        if all(given.get(name, "auto") in ("auto", one) for name, one in zip(PLACED, place, strict=True))
    ] or [tuple(given.get(name, "auto") for name in PLACED)]
    for codec, update, place in itertools.product(codecs, updates, places):
        yield {**given, **dict(zip(PLACED, place, strict=True)), "update": update, "state_codec": codec}


def _describe(plan: PlannedStep) -> str:
    options, places = plan.request.options, plan.places
    codec = "" if options.state_codec == "exact" else f", state in {options.state_codec}"
    return f"parameters on {places['param']}, state on {places['state']}, update={options.update!r}{codec}"

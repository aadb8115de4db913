"""Finds the fastest setting of a session within its budget: each combination is planned, and its step is simulated.

What is chosen is a plan that was predicted, so `offload` does what was compared. The computing is measured once: a placement and
the time of an update do not change it, only a codec changes the update.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from swapper.errors import BudgetError, ConfigError, UnsupportedError
from swapper.paging.virtual_drive import DriveRates
from swapper.train.planning.compute_times import ComputeTimes
from swapper.train.planning.plan import Plan

PLACEMENTS = (("host", "host"), ("host", "nvme"), ("nvme", "nvme"))
PLACED = ("params", "optimizer_state")
"""Places of these."""
SAME = 0.01
"""Settings whose steps differ by less than this part count as equally fast: the first in the order above is chosen."""


def choose_fastest(
    plan_for: Callable[..., Plan],
    given: Mapping[str, Any],
    codecs: Sequence[Any],
    updates: Sequence[str],
    tokens: int,
    example: Sequence[Any] | Mapping[str, Any] | None,
    rates: tuple[int | str | None, int | str | None],
) -> Plan:
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
    found: list[tuple[float, str, Plan, DriveRates, ComputeTimes]] = []
    computing: dict[str, ComputeTimes] = {}
    for options in _combinations(given, codecs, updates):
        try:
            plan = plan_for(**options)
        except (BudgetError, UnsupportedError) as error:
            refusals.append(error)
            continue
        codec, drive = repr(options["state_codec"]), plan.drive_rates(*rates)
        if codec not in computing:
            computing[codec] = plan.measure_compute(tokens, example)
        compute = plan.with_gradients(computing[codec])
        found.append((plan.simulate(drive, compute).wall_s, _describe(plan), plan, drive, compute))
    if not found:
        raise refusals[-1]
    min_s = min(seconds for seconds, *_ in found)
    seconds, words, plan, drive, compute = next(one for one in found if one[0] <= min_s * (1 + SAME))
    plan.predict_on(drive, compute)
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


def _describe(plan: Plan) -> str:
    options, places = plan.request.options, plan.places
    codec = "" if options.state_codec == "exact" else f", state in {options.state_codec}"
    return f"parameters on {places['param']}, state on {places['state']}, update={options.update!r}{codec}"

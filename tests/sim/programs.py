"""Programs for the simulated pager: a training run as hooks and sweep would make it, and one without any sense.

Both only ask for what they may ask for (`Run.is_allowed`), and go on after errors as a program does that catches them.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from simulated_engine import SimulationError
from simulated_run import Lease, Run

from swapper.paging.pager import Pager
from swapper.paging.schedule import Access

TOLERANCES = (None, 1, 4)
PATIENCE = 60
"""A program gives up asking after so many errors in a row."""


def train(
    seed: int,
    fault_rate: float = 0.0,
    threads: bool = False,
    pager_class: type[Pager] = Pager,
    stray_rate: float | None = None,
) -> Run:
    """Run some steps of training: forward, backward, optimizer; now and then out of the usual order.

    Args:
        stray_rate: see `Run`; None lets the seed say.
    """
    random = Random(f"train {seed}")
    groups = random.randint(1, 5)
    param_pages = [random.randint(1, 4) for _ in range(groups)]
    state_pages = [random.randint(1, 6) for _ in range(groups)]
    numbers = iter(range(sum(param_pages) + sum(state_pages)))
    params = [tuple(next(numbers) for _ in range(count)) for count in param_pages]
    states = [tuple(next(numbers) for _ in range(count)) for count in state_pages]
    has_master = random.random() < 0.5
    slices = [part for g in range(groups) for part in _slices(random, g, params[g], states[g], has_master)]
    uses = [Access(("param", group), pages) for group, pages in enumerate(params)]
    together = [{*params[0], *pages} for pages in params]
    deferred = random.random() < 0.5
    root = set(params[0]) if deferred else set()
    # Any two: parameters without gradient are left out.
    together += [{*root, *a.pages, *b.pages} for a in slices for b in [*slices, *uses]]
    pages = sum(param_pages) + sum(state_pages)
    needed = max(map(len, together))
    frames = min(needed + random.choice([0, 0, 1, 2, 5, pages]), pages)
    guess = random.choice([[], [*uses, *reversed(uses), *slices]])
    sections = [*param_pages, *state_pages]
    options = _options(seed, random, frames, needed, stray_rate)
    run = Run(seed, sections, frames, guess, pager_class, fault_rate, threads, **options)
    for group in range(groups):
        for number in (*states[group], *params[group]):
            _use(run, Access(None, (number,), frozenset({number}), frozenset({number})))
    _commit(run)
    due: list[Access] = []
    for _ in range(random.randint(1, 5)):
        _pass(run, random, uses, due)
        _pass(run, random, uses[::-1])
        if random.random() < 0.2:
            _pass(run, random, uses)  # an evaluation in between
        _commit(run)
        run.go_past_the_guard()
        due = [part for part in slices if random.random() > random.choice([0, 0, 0, 0.2])]
        if not deferred:
            _sweep(run, due)
            due = []
        run.pager.end_step()
        run.check()
        if random.random() < 0.4:
            _publish(run)
    run.finish()
    return run


def wander(
    seed: int,
    fault_rate: float = 0.0,
    threads: bool = False,
    pager_class: type[Pager] = Pager,
    stray_rate: float | None = None,
) -> Run:
    """Ask for one thing after the other, whatever comes to mind. Args: as `train`."""
    random = Random(f"wander {seed}")
    section_pages = [random.randint(1, 6) for _ in range(random.randint(1, 4))]
    pages = sum(section_pages)
    frames = random.randint(1, pages)
    known = [_known_access(random, pages, frames, key) for key in range(random.randint(1, 8))]
    cycle = [random.choice(known) for _ in range(random.randint(0, 12))]
    options = _options(seed, random, frames, 1, stray_rate)
    run = Run(seed, section_pages, frames, cycle, pager_class, fault_rate, threads, **options)
    for number in range(pages):
        if random.random() < 0.9:
            _use(run, Access(None, (number,), frozenset({number}), frozenset({number})))
    for _ in range(120):
        _do_anything(run, random, known)
        run.check()
    run.finish()
    return run


def _options(seed: int, random: Random, frames: int, needed: int, stray_rate: float | None) -> dict[str, Any]:
    """Deferred writes, and writes past the guard, need a frame more than the program itself."""
    if stray_rate is None:
        stray_rate = random.choice([0.0, 0.05])
    return {
        "victim_cache": True,
        "max_deferred_writes": random.choice([0, 1, frames // 2]) if frames > needed else 0,
        "tolerance": TOLERANCES[seed % 3],
        "stray_rate": stray_rate if frames > needed else 0.0,
    }


# --- pieces of training -----------------------------------------------------------------------------------------------


def _slices(
    random: Random, group: int, params: tuple[int, ...], states: tuple[int, ...], has_master: bool
) -> list[Access]:
    """Cut a group into slices that share a page with their neighbours, or do not."""
    count = random.randint(1, len(states))
    seen: set[int] = set()
    slices = []
    for number in range(count):
        share = random.randint(0, 1)
        state = states[number * len(states) // count : (number + 1) * len(states) // count + share]
        param = params[number * len(params) // count : (number + 1) * len(params) // count + share]
        fresh = frozenset(param) - seen if has_master else frozenset()
        seen.update(param)
        pages = (*state, *param)
        slices.append(Access(("slice", group, number), pages, fresh, frozenset(pages)))
    return slices


def _pass(run: Run, random: Random, order: list[Access], due: Sequence[Access] = ()) -> None:
    """A forward or backward: the first group belongs to the model itself and stays leased, the others come and go.

    `due` are slices that each group's update has left to do.
    """
    root = _insist(run, Access(("param", 0), run_pages(order, 0)))
    for access in order:
        _sweep(run, [part for part in due if part.key[1] == access.key[1]])  # type: ignore[index]
        if random.random() < 0.05:
            continue
        if random.random() < 0.05:  # a Ctrl-C: the pass is abandoned, and goes on with the next
            run.drop_leases(kept=[lease for lease in run.leases if lease.other])
            root = _insist(run, root.access)
        _use(run, access)
        if random.random() < 0.1:
            extra = run.random_access()
            if run.is_allowed(extra):
                _use(run, extra)
    run.release(root)
    run.check()


def run_pages(order: list[Access], group: int) -> tuple[int, ...]:
    return next(access.pages for access in order if access.key == ("param", group))


def _sweep(run: Run, slices: list[Access]) -> None:
    """Hand over hand, as train/updates/sweep.py does: lease the next slice, release the last, wait for the next, update it."""
    last: Lease | None = None
    for access in slices:
        run.make_way_for(access)
        lease = run.lease(access)
        if last is not None:
            run.release(last)
        run.check()
        if lease is None or not run.wait(lease):
            lease = _insist(run, access)
        run.check()
        run.change(lease)
        run.go_past_the_guard()
        last = lease
    if last is not None:
        run.release(last)
    run.check()


def _commit(run: Run) -> None:
    for _ in range(PATIENCE):
        if run.commit(flush=run.random.random() < 0.5):
            return
        run.check()
        run.engine.tick()
        run.end_other_leases()
        run.faults.repair()
    raise SimulationError("a commit never succeeds, however often the drive is repaired")


def _publish(run: Run) -> None:
    """A snapshot at a step boundary. If the drive fails, there is none."""
    run.others_run = False
    run.end_other_leases()
    if run.commit():
        run.publish()
    run.others_run = run.threads
    run.check()


def _insist(run: Run, access: Access) -> Lease:
    """Lease `access`, again and again while the drive fails. Somebody repairs it after a while."""
    for attempt in range(PATIENCE):
        run.make_way_for(access)
        lease = run.acquire(access)
        run.check()
        if lease is not None:
            run.go_past_the_guard()
            return lease
        if attempt > 2 or run.random.random() < 0.5:
            run.faults.repair()
    raise SimulationError(f"{access} cannot be leased, however often the drive is repaired")


def _use(run: Run, access: Access) -> None:
    run.release(_insist(run, access))
    run.check()


# --- pieces of wandering ----------------------------------------------------------------------------------------------


def _known_access(random: Random, pages: int, frames: int, key: int) -> Access:
    chosen = random.sample(range(pages), random.randint(1, min(frames, pages, 4)))
    writes = frozenset(i for i in chosen if random.random() < 0.5)
    fresh = frozenset(i for i in writes if random.random() < 0.4)
    return Access(key, tuple(chosen), fresh, writes)


def _do_anything(run: Run, random: Random, known: list[Access]) -> None:
    ready = [lease for lease in run.leases if lease.granted]
    asked = [lease for lease in run.leases if not lease.granted]
    changing = [lease for lease in run.leases if lease.changed]
    run.go_past_the_guard()
    dice = random.random()
    if dice < 0.40:
        _ask(run, random, known)
    elif dice < 0.50 and asked:
        run.wait(random.choice(asked))
    elif dice < 0.58 and ready:
        run.change(random.choice(ready))
    elif dice < 0.80 and ready:
        run.release(random.choice(ready))
    elif dice < 0.84:
        run.flush()
    elif dice < 0.88:
        run.commit(flush=random.random() < 0.5)
    elif dice < 0.91:
        run.pager.end_step()
    elif dice < 0.92:
        run.drop_leases(kept=[lease for lease in run.leases if lease.changed or random.random() < 0.3])
    elif dice < 0.925 and not changing:
        run.discard()
    elif dice < 0.945 and not changing:
        run.drop_leases()
        _publish(run)
    elif dice < 0.95:
        run.faults.repair()
    else:
        for _ in range(random.randint(1, 10)):
            run.engine.tick()


def _ask(run: Run, random: Random, known: list[Access]) -> None:
    choices = [run.random_access(), random.choice(known)]
    if run.schedule.cycle:
        choices += [run.schedule.at(run.schedule.position)] * 4
    access = random.choice(choices)
    if not run.is_allowed(access):
        return
    lease = run.lease(access)
    if lease is not None and random.random() < 0.7:
        run.wait(lease)

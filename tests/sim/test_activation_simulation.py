"""Saved activations come back as they were, within their memory, in every order of events that a seed can bring.

A failing seed is its own reproduction: `pytest tests/sim -k "activation and wander and 17-"`. More seeds: SWAPPER_SIM_SEEDS=5000.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from simulated_activations import ActivationRun, train, wander
from simulated_engine import assert_noticed

from swapper.errors import IoError
from swapper.paging.residency import LEGAL_MOVES, Residency
from swapper.train.activations.saved_tensor_cache import SavedTensorCache, Stored

SEEDS = range(int(os.environ.get("SWAPPER_SIM_SEEDS", "60")))


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("fault_rate", [0.0, 0.05], ids=["sound drive", "failing drive"])
@pytest.mark.parametrize("program", [train, wander])
@pytest.mark.parametrize("seed", SEEDS)
def test_contents_memory_and_places_hold_in_every_order_of_events(program, fault_rate, on_device, seed):
    program(ActivationRun(seed, fault_rate, on_device))


# --- the simulation itself --------------------------------------------------------------------------------------------


def test_the_seeds_meet_every_case(monkeypatch):
    seen: Counter[Any] = Counter()
    move = Stored.move
    monkeypatch.setattr(Stored, "move", lambda stored, new: (seen.update([(stored.residency, new)]), move(stored, new)))
    for seed in range(40):
        for program in (train, wander):
            run = program(ActivationRun(seed, 0.05, on_device=seed % 4 == 0))
            seen += run.engine.seen
            seen["waits"] += run.cache.counters.waits
    assert all(seen[case] > 20 for case in ("read", "write", "failed read", "failed write", "waits")), seen
    c, r, k, d, w = (Residency[name] for name in ("COLD", "READING", "CLEAN", "DIRTY", "WRITING"))
    moves = {(d, w), (w, k), (w, d), (k, c), (c, r), (r, k), (r, c)}
    assert {case for case in seen if isinstance(case, tuple)} == moves < LEGAL_MOVES


class ForgetsUnderWay(SavedTensorCache):
    """Gives a place back though it is written, or read."""

    def _settle(self) -> None:
        self._ending += self.forgotten
        self.forgotten.clear()
        for remains in self._ending:
            self._free(remains)
        self._ending.clear()
        super()._settle()


class WritesBeforeArrival(SavedTensorCache):
    def _send_away(self, more_bytes: int) -> None:
        here = [stored for stored in map(self._alive, self._here) if stored is not None]
        arrivals = [stored.arrival for stored in here]
        for stored in here:
            stored.arrival = None
        super()._send_away(more_bytes)
        for stored, arrival in zip(here, arrivals, strict=True):
            stored.arrival = arrival


class TakesFailuresForContent(SavedTensorCache):
    def _settle_one(self, stored: Stored) -> IoError | None:
        stored.ticket.failure = None
        return super()._settle_one(stored)


class KeepsFailuresOfWrites(SavedTensorCache):
    def _settle_one(self, stored: Stored) -> IoError | None:
        error = super()._settle_one(stored)
        stored.error = None
        return error


class ReleasesBeforeTheWrite(SavedTensorCache):
    def _write(self, stored: Stored) -> None:
        super()._write(stored)
        self._release(stored)


class ReleasesWhatIsInMemoryOnly(SavedTensorCache):
    def _write(self, stored: Stored) -> None:
        self._release(stored)


class DoesNotWaitForReads(SavedTensorCache):
    def fetch(self, stored: Stored) -> torch.Tensor:
        memory = super().fetch(stored)
        if stored.offset is not None and stored.residency is Residency.CLEAN:
            self._release(stored)
            self._read(stored)
            assert stored.memory is not None
            return stored.memory
        return memory


class HasNoLimit(SavedTensorCache):
    def _wait_for_room(self, more_bytes: int) -> None:
        self._send_away(more_bytes)


class LooksTwiceAtArrivals(SavedTensorCache):
    """What arrives between the two looks is neither written nor waited for."""

    def _wait_for_arrival(self, more_bytes: int) -> bool:
        oldest = self._alive(next(iter(self._here), -1))
        has_come = oldest is not None and oldest.arrival is not None and oldest.arrival.done
        return not has_come and super()._wait_for_arrival(more_bytes)


class WaitsForWritesOnly(SavedTensorCache):
    """Where room is needed while reads are under way."""

    def _wait_for_room(self, more_bytes: int) -> None:
        reading = {n: s for n in self._moving if (s := self._alive(n)) and s.residency is Residency.READING}
        hidden = {number: self._moving.pop(number) for number in reading}
        super()._wait_for_room(more_bytes)
        self._moving = {**hidden, **self._moving}


class ReadsAheadWithoutRoom(SavedTensorCache):
    def _lacks_room(self, stored: Stored) -> bool:
        return False


class KeepsPlaces(SavedTensorCache):
    def _free(self, remains: Any) -> None:
        give, self._file.give = self._file.give, lambda offset, nbytes: None  # type: ignore[method-assign]
        super()._free(remains)
        self._file.give = give  # type: ignore[method-assign]


class CountsTwice(SavedTensorCache):
    def _read(self, stored: Stored) -> None:
        super()._read(stored)
        self._add(stored.nbytes)


TOO_MUCH = "bytes are held, of at most"
BROKEN = [
    (ForgetsUnderWay, "starts before .* of the same place has ended"),
    (WritesBeforeArrival, "COLD, and the file has something else"),
    (TakesFailuresForContent, "COLD, and the file has something else"),
    (KeepsFailuresOfWrites, TOO_MUCH),
    (ReleasesBeforeTheWrite, "WRITING -> COLD is not a legal move"),
    (ReleasesWhatIsInMemoryOnly, "COLD, and the file has something else"),
    (DoesNotWaitForReads, "is not what was saved"),
    (HasNoLimit, TOO_MUCH),
    (LooksTwiceAtArrivals, TOO_MUCH),
    (WaitsForWritesOnly, TOO_MUCH),
    (ReadsAheadWithoutRoom, TOO_MUCH),
    (KeepsPlaces, "memory or a place of the file was not given back"),
    (CountsTwice, "bytes are held, and .* are counted"),
]


@pytest.mark.parametrize("cache_class, what", BROKEN, ids=[cache_class.__name__ for cache_class, _ in BROKEN])
def test_a_cache_that_breaks_a_rule_is_noticed_for_that_rule(cache_class, what):
    runs = (partial(_run, seed, program) for seed in range(200) for program in (train, wander))
    assert_noticed(what, ((partial(run, cache_class=cache_class), run) for run in runs))


def _run(seed: int, program: Callable[[ActivationRun], object], **options: Any) -> None:
    program(ActivationRun(seed, 0.05, **options))

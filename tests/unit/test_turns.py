"""Turns: a thread that waits looks whether the owner is still inside, and ends nothing by that."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from swapper.modules.turns import Turns, is_running


def test_who_looks_for_the_owner_of_a_turn_that_a_context_has_taken_does_not_end_the_context() -> None:
    """As `manager.gather`, which takes a turn, gives it, and is suspended then: the look may come that late."""
    turns = Turns()
    ended: list[threading.Thread] = []

    @contextmanager
    def gather() -> Iterator[None]:
        with turns.turn():
            owners.append(turns._owners[None])
        try:
            yield
        finally:
            ended.append(threading.current_thread())

    owners: list[Any] = []
    with gather():
        found: list[bool] = []
        thread = threading.Thread(target=lambda: found.append(is_running(owners[0].frame)))
        thread.start()
        thread.join()
        assert found == [False] and ended == [], "the context was ended by another thread, inside of it"
    assert ended == [threading.current_thread()]


def test_a_turn_that_its_thread_has_left_behind_is_taken_over() -> None:
    turns = Turns()

    def leave_behind() -> None:
        turns.turn().__enter__()

    @contextmanager
    def interrupted() -> Iterator[None]:
        leave_behind()
        yield

    with interrupted():
        taken: list[bool] = []
        thread = threading.Thread(target=lambda: taken.append(turns.take()))
        thread.start()
        thread.join(60)
        assert taken == [True]

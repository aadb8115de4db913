"""All is ended, the first error is told, and nothing is kept by it."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref

import pytest

from swapper.runtime.interrupts import close_all


class Thing:
    pass


def test_all_are_called_in_order_and_the_first_error_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    called = []

    def end(number: int, error: BaseException | None) -> None:
        called.append(number)
        if error is not None:
            raise error

    errors = [None, KeyboardInterrupt(), ValueError("the second"), None]
    with caplog.at_level(logging.ERROR), pytest.raises(KeyboardInterrupt):
        close_all(lambda n=n, e=e: end(n, e) for n, e in enumerate(errors))
    assert called == [0, 1, 2, 3]
    assert [record.getMessage() for record in caplog.records] == ["ValueError: the second (after another error)"]


def test_what_had_raised_is_freed_without_the_garbage_collector() -> None:
    kept = []

    def end() -> None:
        thing = Thing()
        kept.append(weakref.ref(thing))
        raise ValueError

    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            close_all([end])
        assert kept[0]() is None
    finally:
        gc.enable()

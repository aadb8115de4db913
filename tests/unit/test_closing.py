"""All is ended, the first error is told, and nothing is kept by it."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from typing import Protocol

import pytest

from swapper.errors import StateError
from swapper.runtime.interrupts import close_all, forget, is_closed


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


def test_what_is_closed_for_good_keeps_nothing_and_refuses_every_use() -> None:
    class Owner(Protocol):
        def use(self) -> None: ...

    class Generic(Owner):
        def __init__(self) -> None:
            self.thing = Thing()
            self.itself = self

        def use(self) -> None:
            pass

    gc.disable()
    try:
        owner = Generic()
        thing = weakref.ref(owner.thing)
        use = owner.use
        assert not is_closed(owner)
        forget(owner, "the owner is closed")
        assert thing() is None
        assert is_closed(owner)
        for name in ("use", "thing", "never_there"):
            with pytest.raises(StateError, match="the owner is closed"):
                getattr(owner, name)
        ghost = weakref.ref(owner)
        del owner, use
        assert ghost() is None
    finally:
        gc.enable()

"""Signals, deferred where they would leave something half-changed; and closing several things of which each may raise.

Python runs the handler of a signal between any two instructions of the main thread, so that what it raises (KeyboardInterrupt,
SystemExit, a TimeoutError) may arise in the middle of a list being changed. Within `defer_signals` signals are only noted, and
their handlers run at its end. A second Ctrl-C takes effect at once, for a user who cannot wait.

[Note: handlers in handlers] The first section in the main thread puts a `DeferredHandler` around each handler that Python has,
and replaces the functions below `signal.signal` and `signal.getsignal`, so that later handlers get one too and a program sees
its own. Where a signal arrives (in another thread, by `_thread.interrupt_main`) or when (just before the section) makes no
difference then, and a section costs no system call.
"""

from __future__ import annotations

import _signal as unnamed  # what `signal.signal` calls, by these names
import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NoReturn

from swapper import _C
from swapper.errors import StateError, SwapperError
from swapper.runtime.process import is_off

log = logging.getLogger("swapper")

_set_handler, _get_handler = unnamed.signal, unnamed.getsignal

PROMPT = "_swapper_prompt"
"""Attribute of a handler that is not deferred: it raises nothing, and is needed in the middle of a wait."""


def _deferred(handler: object) -> object:
    """Return what Python is to call in place of `handler`, which may also be one of the system's, a number."""
    if not callable(handler) or isinstance(handler, _C.DeferredHandler) or hasattr(handler, PROMPT):
        return handler
    return _C.DeferredHandler(handler)


def _original(handler: object) -> object:
    return handler.handler if isinstance(handler, _C.DeferredHandler) else handler


def _set_deferred(number: int, handler: object, /) -> object:
    return _original(_set_handler(number, _deferred(handler)))


def _get_original(number: int, /) -> object:
    return _original(_get_handler(number))


def _prepare() -> bool:
    """Have handlers deferred. Returns False in a thread that may not change them; may be ended by one, and begin again."""
    if is_off("signals"):
        return True
    if threading.get_ident() != threading.main_thread().ident:
        return False
    unnamed.signal, unnamed.getsignal = _set_deferred, _get_original
    for number in unnamed.valid_signals():
        if callable(handler := _get_handler(number)):
            unnamed.signal(number, handler)
    return True


_signals = _C.DeferredSignals(_prepare)

defer_signals: AbstractContextManager[None] = _signals
"""In the main thread, handlers of signals wait for the end of this context, which may be nested. In others it does nothing."""


def run_uninterrupted(action: Callable[[], None]) -> None:
    """Do `action` within `defer_signals`, even if a signal comes just before: for actions that give something back."""
    begun = False
    try:
        with defer_signals:
            begun = True
            action()
    except BaseException:
        if not begun:
            with defer_signals:
                action()
        raise


def make_lock() -> _C.SteadyLock:
    """Return a mutex within which signals are deferred. It notes an error that is not swapper's within: see `broken_by`."""
    return _C.SteadyLock(_signals, SwapperError)


def close_all(endings: Iterable[Callable[[], object]]) -> None:
    """Call all, in order, even if some raise; then raise the first error. Later errors are logged.

    Not `contextlib.ExitStack`: an error that went through one is in a cycle with its own traceback. What the traceback's frames
    hold, as tensors that the autograd graph has too, is then found by no garbage collector, and stays.
    """
    failures: list[BaseException] = []
    for end in endings:
        try:
            end()
        except BaseException as error:  # also Ctrl-C: half-closed is worse than a moment's wait
            if failures:
                log.error("%s: %s (after another error)", type(error).__name__, str(error))  # not its frames
            else:
                failures.append(error)
    if failures:
        try:
            raise failures[0]
        finally:
            failures.clear()  # its traceback has this frame


def forget(owner: Any, why: str) -> None:
    """Close `owner` for good, in case a cycle or a traceback keeps it: it refers to nothing, and refuses every use, with `why`."""
    vars(owner).clear()
    vars(owner)["why_closed"] = why
    cls: Any = type(owner)
    object.__setattr__(owner, "__class__", _closed(cls))


def is_closed(owner: object) -> bool:
    """Return True after `forget(owner)`."""
    return vars(type(owner)).get("__getattribute__") is _refuse


@cache
def _closed(cls: Any) -> type:
    """Return the class of closed objects of a class."""
    return type(f"Closed{cls.__name__}", (cls,), {"__slots__": (), "__getattribute__": _refuse})


def _refuse(closed: object, name: str) -> NoReturn:
    raise StateError(object.__getattribute__(closed, "why_closed"))

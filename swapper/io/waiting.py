"""Waiting for tickets: for all of them, whatever one raises, so that their memory can be used again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any


def wait_for_all(tickets: Iterable[Any]) -> None:
    """Wait for every ticket, also where one has failed: the others may still use their memory. Raises the first error."""
    failures: list[BaseException] = []
    for ticket in tickets:
        try:
            ticket.wait()
        except BaseException as error:
            failures.append(error)
            drain(ticket)
    if failures:
        try:
            raise failures[0]
        finally:
            failures.clear()  # its traceback has this frame: see runtime/teardown.py


@contextlib.contextmanager
def all_over() -> Iterator[list[Any]]:
    """Within it tickets are appended to what it gives. At its end all are over, whatever happened. Raises the first error.

    For transfers from and into memory that others use next. (That it does not go before they are over, the engine sees to.)
    """
    tickets: list[Any] = []
    try:
        yield tickets
    except BaseException:
        for ticket in tickets:
            drain(ticket)
        raise
    wait_for_all(tickets)


def drain(ticket: Any) -> None:
    """Wait until the engine has let go of the ticket's memory, well or not."""
    while not ticket.done:
        with contextlib.suppress(Exception):
            ticket.wait()

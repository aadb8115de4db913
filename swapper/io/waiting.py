"""Waits for tickets: for all of them, whatever one raises, so that their memory can be reused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from swapper.io.engines import Transfer


def wait_for_all(tickets: Iterable[Transfer]) -> None:
    """Wait for every ticket, even after one has failed, since others may use their memory. Raises the first error."""
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
            failures.clear()  # its traceback refers to this frame: see runtime/interrupts.py


@contextlib.contextmanager
def all_over() -> Iterator[list[Transfer]]:
    """Yield a list for tickets. At the end of the context all are over, whatever happened. Raises the first error.

    For transfers whose memory others use next. (The engine itself keeps the memory alive until they are over.)
    """
    tickets: list[Transfer] = []
    try:
        yield tickets
    except BaseException:
        for ticket in tickets:
            drain(ticket)
        raise
    wait_for_all(tickets)


def drain(ticket: Transfer) -> None:
    """Wait until the engine has released the ticket's memory, whatever its outcome."""
    while not ticket.done:
        with contextlib.suppress(Exception):
            ticket.wait()

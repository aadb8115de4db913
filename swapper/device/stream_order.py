"""The order of streams within a backward: what one of them has written, another reads before torch has joined them.

[Note: streams of a backward] Autograd runs each node on the stream on which its operation was in the forward, and hooks on the
stream of their node. A parameter's gradient is written, and the hook after it runs, on the stream that was current when the forward
first used the parameter; it is good on that stream only, until the backward is over: then torch has the stream of whoever called it
wait for all of those. So who uses gradients before (`update="backward"`), on the stream of whatever hook comes next, has that
stream wait for the parameters' streams; and what it queues there is waited for by the caller's stream when the backward is over.

With one stream, nothing is recorded and nothing waited for.
"""

from __future__ import annotations

from typing import Any

from swapper.device.device import Device


class StreamOrder:
    """Knows the streams on which there is something that the next user has to wait for.

    Args:
        device: whose streams.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._noted: set[Any] = set()

    def note(self) -> None:
        """What is queued on the current stream will be used, perhaps on another one."""
        self._noted.add(self._device.current_stream())

    def follow(self) -> None:
        """Have the current stream wait for all that was noted, and what is queued on it from now on is noted."""
        current = self._device.current_stream()
        for stream in self._noted - {current}:
            self._device.let_wait(current, self._device.record(stream))
        self._noted = {current}

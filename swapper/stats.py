"""Counters of one manager: bytes, steps, and where time was lost. Plain numbers, kept by whoever does the work."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Stats:
    """What a manager has done so far. Bytes are of the engine's completed transfers, times in seconds."""

    step: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    read_wait_s: float = 0.0
    """Time that computation waited for pages to arrive."""
    frame_wait_s: float = 0.0
    """Of that, time in which no frame was free."""
    update_s: float = 0.0
    """Time in the optimizer's arithmetic."""
    pool_bytes: int = 0
    frame_bytes: int = 0
    resident_bytes: int = 0
    state_bytes: int = 0
    """Parameters, masters and optimizer state together."""

    def snapshot(self) -> dict[str, int | float]:
        return asdict(self)

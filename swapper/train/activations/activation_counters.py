"""What saved activations cost and gain, counted: how many there were, what was moved, what they hold and held."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ActivationCounters:
    """What was done so far.

    Attributes:
        saved: tensors that autograd saved and that were taken over.
        storages: different ones among them; each is moved once.
        left_alone: tensors that were not: small ones, parameters and their views, those of special kinds.
        written_bytes, read_bytes: moved, as submitted.
        waits: how many times backward waited for a storage.
        held_bytes: what storages have in host memory now.
        peak_bytes: the most that they had at one time.
        down_bytes, up_bytes: copied from accelerators and to them.
        unlocked_bytes: of these, what was copied slowly, through memory that is not page-locked, because no stretch of the
            page-locked memory was long enough.
        device_held_bytes: what storages have on accelerators now, in the order of their streams.
        device_peak_bytes: the most that they had there at one time.
    """

    saved: int = 0
    storages: int = 0
    left_alone: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    waits: int = 0
    held_bytes: int = 0
    peak_bytes: int = 0
    down_bytes: int = 0
    up_bytes: int = 0
    unlocked_bytes: int = 0
    device_held_bytes: int = 0
    device_peak_bytes: int = 0

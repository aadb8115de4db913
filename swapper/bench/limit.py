"""Computes the physical limit of a training step: the times of drive and kernels with full overlap.

A drive reads and writes at the same time as the processor computes, so a step cannot be shorter than the longest of the
three (docs/internals.md); nor, if reads and writes share the drive's speed, than both at that speed.
"""

from __future__ import annotations

from dataclasses import dataclass

from swapper.bench.drive import DriveSpeed


@dataclass(frozen=True)
class StepLimit:
    """Minimum seconds of a step, by cause. `compute_s` is 0 if it was not measured."""

    read_s: float
    write_s: float
    both_s: float
    compute_s: float

    @classmethod
    def of(cls, speed: DriveSpeed, read_bytes: float, written_bytes: float, compute_s: float) -> StepLimit:
        """Return the limit of a step with these bytes on a drive of this speed."""
        return cls(
            read_bytes / speed.read_bytes_per_s,
            written_bytes / speed.write_bytes_per_s,
            (read_bytes + written_bytes) / speed.both_bytes_per_s,
            compute_s,
        )

    @property
    def seconds(self) -> float:
        return max(self.by_cause.values())

    @property
    def cause(self) -> str:
        """Return the cause of the limit."""
        return max(self.by_cause, key=lambda cause: self.by_cause[cause])

    @property
    def by_cause(self) -> dict[str, float]:
        return {
            "reads": self.read_s,
            "writes": self.write_s,
            "reads and writes": self.both_s,
            "compute": self.compute_s,
        }


def step_bytes(parameters: int, *, parameters_on_nvme: bool, masters: bool) -> tuple[int, int]:
    """Return the bytes that one AdamW step (reads, writes) with the optimizer state on NVMe.

    fp32 masters and two moments are 12 bytes a parameter each way, two fp32 moments 8. Parameters on NVMe are read in
    forward and in backward and written once: 2 bytes each with fp32 masters, else 4, and then read by the update too.
    """
    state = 12 if masters else 8
    if not parameters_on_nvme:
        return state * parameters, state * parameters
    width, uses = (2, 2) if masters else (4, 3)
    return (state + uses * width) * parameters, (state + width) * parameters

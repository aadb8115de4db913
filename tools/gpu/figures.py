"""All measurements, by name, with the figures that each is to give: what is missing of them is told in the table."""

from __future__ import annotations

from gpu import checkpoints, copies, drive, inference, kernels
from gpu.bench import Measurement

FIGURES: dict[str, tuple[Measurement, tuple[str, ...]]] = {
    "copies": (copies.arena_copies, (copies.UP, copies.DOWN)),
    "adamw": (kernels.adamw_kernel, kernels.ADAMW),
    "inference": (inference.passes, inference.PASSES),
    "staged": (drive.through_host_memory, drive.STAGED),
    "cufile": (drive.by_cufile, drive.DIRECT),
    "gdsfile": (drive.by_gds_file, drive.FILE),
    "quantised": (kernels.quantised_kernels, kernels.QUANTISED),
    "norm": (kernels.norm_kernel, (kernels.NORM,)),
    "pages": (kernels.page_kernels, kernels.PAGES),
    "checkpoints": (checkpoints.saves_and_loads, (*checkpoints.SAVES, *checkpoints.LOADS)),
}
"""In the order of what must not be lost when time runs out."""

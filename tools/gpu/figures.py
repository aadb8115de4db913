"""Lists all measurements by name, with their figures (the table reports missing ones) and deadlines.

A measurement starts only if its deadline is within the run's. Rows are written as they come, so that one that is ended loses
only those after.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from gpu import (
    activations,
    checkpoints,
    copies,
    drive,
    facts,
    generation,
    inference,
    kernels,
    language_model,
    libraries,
    placed,
    recovery,
    sharded,
    training,
    twins,
    zero,
)
from gpu.bench import Measurement


class Figures(NamedTuple):
    measure: Measurement
    names: tuple[str, ...]
    deadline_s: float


LLAMA = {
    f"llama-{name}": Figures(partial(language_model.fine_tuning, name), language_model.figures_of(name), 60)
    for name in (
        "step",
        "defaults",
        "clipped",
        "8bit",
        "clipped-8bit",
        "device",
        "host",
        "backward",
        "deferred",
        "nvme",
    )
}
GENERATION = {
    f"generate-{name}": Figures(partial(generation.generation, name), generation.figures_of(name), deadline_s)
    for name, deadline_s in {"host": 75, "nvme": 90, "int8": 60, "int4": 60}.items()
}
SHARDED = {
    f"fsdp2-{update}": Figures(partial(sharded.sharded, update), (sharded.figure_of(update),), 60)
    for update in sharded.UPDATES
}
ZERO = {f"zero-{stage}": Figures(partial(zero.zero, stage), zero.figures_of(stage), 90) for stage in zero.STAGES}
TRAINING = {
    f"training-{state}": Figures(partial(training.training, state), training.figures_of(state), 75)
    for state in ("host", "nvme")
}

FIGURES: dict[str, Figures] = {
    "facts": Figures(facts.facts, (facts.MEMORY, *facts.REGISTERED), 60),
    **LLAMA,
    "llama-7b": Figures(language_model.seven, (language_model.SEVEN,), 75),
    **SHARDED,
    **ZERO,
    "fsdp2-offload": Figures(sharded.offloaded_by_fsdp, (sharded.OFFLOADED,), 75),
    "inference": Figures(inference.passes, inference.PASSES, 60),
    **GENERATION,
    "copies": Figures(copies.measurements, (copies.UP, copies.DOWN, copies.QUEUEING, copies.NEIGHBORS), 40),
    "quantised": Figures(kernels.quantised_kernels, kernels.QUANTISED, 40),
    "checkpoints": Figures(checkpoints.saves_and_loads, (*checkpoints.SAVES, *checkpoints.LOADS), 60),
    "killed": Figures(recovery.killed, (recovery.KILLED,), 60),
    "short": Figures(recovery.short, (recovery.SHORT,), 45),
    "twins": Figures(twins.twins, (twins.TWINS,), 60),
    "libraries": Figures(libraries.libraries, tuple(map(libraries.figure_of, libraries.RUNS)), 60),
    "adamw": Figures(kernels.adamw_kernel, kernels.ADAMW, 45),
    "activations": Figures(activations.activations, activations.FIGURES, 75),
    "large": Figures(training.four_times_the_budget, (training.LARGE,), 45),
    **TRAINING,
    "streamed": Figures(training.streamed, (training.STREAMED,), 45),
    "placed": Figures(placed.placed, (placed.BY_KERNEL, *placed.PLACED), 60),
    "staged": Figures(drive.through_host_memory, drive.STAGED, 45),
    "cufile": Figures(drive.by_cufile, drive.DIRECT, 40),
    "gdsfile": Figures(drive.by_gds_file, drive.FILE, 45),
}
TESTS, TESTS_BEFORE, TESTS_S = "tests", "adamw", 150
ORDER = [name for before in FIGURES for name in ((TESTS, before) if before == TESTS_BEFORE else (before,))]
"""By worth: what is measured before time runs out."""

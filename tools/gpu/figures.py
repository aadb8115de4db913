"""Lists all measurements by name, with their figures (the table reports missing ones) and deadlines.

A measurement that hangs takes no more than its deadline. The tests run in between, after the figures with bars.
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


FIGURES: dict[str, Figures] = {
    "facts": Figures(facts.facts, (facts.MEMORY, *facts.REGISTERED), 60),
    "copies": Figures(copies.measurements, (copies.UP, copies.DOWN, copies.QUEUEING, copies.NEIGHBORS), 40),
    "adamw": Figures(kernels.adamw_kernel, kernels.ADAMW, 45),
    "activations": Figures(activations.activations, activations.FIGURES, 100),
    "staged": Figures(drive.through_host_memory, drive.STAGED, 45),
    "inference": Figures(inference.passes, inference.PASSES, 60),
    "large": Figures(training.four_times_the_budget, (training.LARGE,), 45),
    "training": Figures(
        training.training,
        (*training.TRAINING, training.STREAMED),
        130,
    ),
    "placed": Figures(placed.placed, (placed.BY_KERNEL, *placed.PLACED), 60),
    "quantised": Figures(kernels.quantised_kernels, kernels.QUANTISED, 40),
    "cufile": Figures(drive.by_cufile, drive.DIRECT, 40),
    "gdsfile": Figures(drive.by_gds_file, drive.FILE, 45),
    "checkpoints": Figures(checkpoints.saves_and_loads, (*checkpoints.SAVES, *checkpoints.LOADS), 60),
    **{
        f"llama-{name}": Figures(partial(language_model.fine_tuning, name), language_model.figures_of(name), 75)
        for name in language_model.WAYS
    },
    "llama-7b": Figures(language_model.seven, (language_model.SEVEN,), 110),
    **{
        f"generate-{name}": Figures(partial(generation.generation, name), generation.figures_of(name), 90)
        for name in generation.WAYS
    },
    **{
        f"fsdp2-{update}": Figures(partial(sharded.sharded, update), (sharded.figure_of(update),), 60)
        for update in sharded.UPDATES
    },
    "fsdp2-offload": Figures(sharded.offloaded_by_fsdp, (sharded.OFFLOADED,), 60),
    **{f"zero-{stage}": Figures(partial(zero.zero, stage), zero.figures_of(stage), 90) for stage in zero.STAGES},
    "killed": Figures(recovery.killed, (recovery.KILLED,), 60),
    "short": Figures(recovery.short, (recovery.SHORT,), 45),
    "twins": Figures(twins.twins, (twins.TWINS,), 60),
    "libraries": Figures(libraries.libraries, tuple(map(libraries.figure_of, libraries.RUNS)), 60),
}
TESTS, TESTS_BEFORE, TESTS_S = "tests", "quantised", 150
ORDER = [name for before in FIGURES for name in ((TESTS, before) if before == TESTS_BEFORE else (before,))]
"""Measurements that must not be lost when time runs out."""

"""Says what a load consists of: its weights, their placement, and the memory that it takes; and what is predicted of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from swapper.errors import ConfigError
from swapper.formats.sources import Source
from swapper.infer.matching import Match
from swapper.infer.planning.infer_placement import Fit
from swapper.io.tensor_bytes import SECTOR_BYTES, round_up
from swapper.paging.layout import resident_bytes
from swapper.runtime.sizes import format_bytes
from swapper.runtime.stats import StepStats


@dataclass(frozen=True)
class ExpertUse:
    """What a mixture reads of its experts, which no plan knows.

    Attributes:
        experts: that a token is routed to, in each layer.
        hit_rate: part of them that memory has, from 0 to 1.
    """

    experts: int
    hit_rate: float

    def __post_init__(self) -> None:
        if type(self.experts) is not int or self.experts < 1 or not 0 <= self.hit_rate <= 1:
            raise ConfigError(f"experts={self.experts!r}, hit_rate={self.hit_rate!r}: give at least 1, and 0 to 1")


@dataclass(frozen=True)
class LoadPrediction:
    """A pass over a prompt, the first one, and a later pass of one token, in the words of a training step. Print it.

    Attributes:
        first, token: the passes.
        activation_bytes: the peak of the first pass's results, in addition to `LoadPlan.memory`.
    """

    first: StepStats
    token: StepStats
    activation_bytes: int

    def __str__(self) -> str:
        lines = [
            f"{name:<12}{step.wall_s:.3f} s, {format_bytes(step.read_bytes)} read, bound by {step.bound}"
            for name, step in (("first token", self.first), ("each token", self.token))
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class PlannedLoad:
    """The placement of a model's weights by `swapper.load`, for kernels on the CPU.

    Attributes:
        model, matched: the user's model, which is not changed, and the tensors of its parameters.
        source: the weights.
        host_bytes: the budget.
        fitting: what streams, and the pool.
    """

    model: nn.Module = field(repr=False)
    matched: Match = field(repr=False)
    source: Source = field(repr=False)
    host_bytes: int
    fitting: Fit = field(repr=False)

    @property
    def memory(self) -> dict[str, int]:
        """The peak of host memory by part, in bytes, beyond the imported libraries and activations."""
        plan, placement = self.fitting.plan, self.fitting.placement
        small_bytes = sum(round_up(run.nbytes, SECTOR_BYTES) for run in plan.small_runs)
        parts = {
            "what stays": plan.fixed_bytes - small_bytes + resident_bytes([run.nbytes for run in plan.small_runs]),
            "experts": plan.cache_bytes(self.host_bytes),
            "pool": placement.pool_bytes,
            "staging": plan.staging_bytes,
        }
        return {name: nbytes for name, nbytes in parts.items() if nbytes}

"""Plans a load without carrying it out, and predicts its seconds: of the first token, and of each token after it.

A pass is the dry run of paging/dry_run.py: the real pager on a simulated drive, between computing that is measured here. The first
pass reads every weight; later ones read what does not stay.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from swapper.errors import ConfigError
from swapper.formats.sources import Rename, Source, open_source
from swapper.infer.experts import are_experts
from swapper.infer.matching import Match, Weight, match
from swapper.infer.planning.infer_placement import Fit, fit
from swapper.infer.planning.lease_costs import measure_lease_costs, measure_resident_lease
from swapper.infer.planning.streaming_plan import build_streaming_plan
from swapper.infer.streaming import paged_sections
from swapper.infer.weight_rows import PARTS_IN_MEMORY, RowPartitionedLinear, RowPrefetcher
from swapper.infer.weights import MadeMemory
from swapper.io.drives import find_tuning
from swapper.io.tensor_bytes import SECTOR_BYTES, round_up
from swapper.modules.groups import by_module
from swapper.modules.operations import ROUNDS, OperationTimes, cold_seconds, middle, record
from swapper.options import parse_host_memory
from swapper.paging.capped_drive import open_drive
from swapper.paging.dry_run import DryRun, Task
from swapper.paging.layout import resident_bytes
from swapper.paging.schedule import Access
from swapper.paging.section import Section
from swapper.paging.virtual_drive import DriveRates, PagingCosts, VirtualDrive
from swapper.runtime.sizes import format_bytes, parse_bytes_a_second
from swapper.runtime.stats import StepStats

log = logging.getLogger("swapper")

TRIAL_ELEMENTS = 1 << 22
"""Of a quantized weight that is computed in a trial; of a larger one some rows are."""
TRIALS = 5


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
class LoadPlan:
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

    def predict(
        self,
        tokens: int,
        *,
        batch: int = 1,
        example: Sequence[Any] | None = None,
        experts: ExpertUse | None = None,
        drive_read: int | str | None = None,
    ) -> LoadPrediction:
        """Predict the seconds of the first token, after a prompt, and of each token after it.

        The computing is measured here and now, in some seconds: the operations of a forward, and the computing of weights that
        are stored otherwise. A cache of keys and values is not in it.

        Args:
            tokens: of the prompt, of one sample.
            batch: samples that pass together.
            example: arguments of the first pass. Default: integers of shape (batch, tokens), as of a language model.
            experts: for a mixture whose experts are read one by one: what it uses of them.
            drive_read: bytes a second, or "7GB/s". Default: what `swapper tune` measured.

        Raises:
            ConfigError: the drive's speed is not known, or a value is not positive; a mixture needs `experts`.
        """
        tuning = find_tuning(next(iter(self.source.stamps)).parent)
        slowing_byte_s = 0.0 if tuning is None else tuning.slowing_byte_s
        if drive_read is not None:
            rate = parse_bytes_a_second(drive_read, "drive_read")
            drive = DriveRates(rate, rate, rate, slowing_byte_s=slowing_byte_s)
        elif tuning is not None:
            drive = DriveRates.measured(tuning)
        else:
            raise ConfigError(
                "the drive's speed is not known: run `swapper tune DIR`, or give predict(..., "
                "drive_read='7GB'), its bytes a second"
            )
        return self.predict_on(drive, tokens, batch=batch, example=example, experts=experts)

    def predict_on(
        self,
        drive: DriveRates,
        tokens: int,
        *,
        batch: int = 1,
        example: Sequence[Any] | None = None,
        experts: ExpertUse | None = None,
    ) -> LoadPrediction:
        """Predict as `predict`, on a drive with these rates.

        Args:
            drive: bytes a second.
            tokens, batch, example, experts: see `predict`.

        Raises:
            ConfigError: see `predict`.
        """
        for name, value in (("tokens", tokens), ("batch", batch)):
            if type(value) is not int or value < 1:
                raise ConfigError(f"predict({name}={value!r}): give a positive number")
        plan = self.fitting.plan
        if (plan.experts or plan.demanded) and experts is None:
            raise ConfigError(
                "this model's experts are read one by one, and how many is not known: give predict(..., "
                "experts=swapper.ExpertUse(experts=2, hit_rate=0.5)), of a layer and token"
            )
        prompt = (_tokens(batch, tokens),) if example is None else tuple(example)
        rounds: list[dict[str, Any]] = []
        for _ in range(ROUNDS):
            times = OperationTimes()
            made = self._making_seconds(times)
            passes = [self._computing(times, args, made, experts) for args in (prompt, (_tokens(batch, 1),))]
            paging = measure_lease_costs(self.fitting.placement.page_bytes, bool(made))
            resident_s = measure_resident_lease(bool(made))
            rounds.append({"first": passes[0][0], "token": passes[1][0], "paging": paging, "resident_s": resident_s})
        found, streamed = middle(rounds), self.fitting.placement.streamed
        costs = found["paging"], found["resident_s"]
        first = self._pass(drive, *costs, found["first"], None, self._on_demand(experts, batch * tokens))
        token = self._pass(drive, *costs, found["token"], streamed, self._on_demand(experts, batch))
        return LoadPrediction(first, token, passes[0][1])

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

    def _computing(
        self, times: OperationTimes, args: Sequence[Any], made: dict[int, float], experts: ExpertUse | None
    ) -> tuple[dict[int, float], int]:
        """Return the seconds of a pass, by group, and the peak bytes of its results."""
        dtypes = {id(weight.parameter): weight.recipe.dtype for weight in self.matched.weights}
        found = {group.index: made.get(group.index, 0.0) for group in self.fitting.plan.groups}
        try:
            recording = record(self.model, by_module(self.model)[1], args, {}, False, dtypes)
        except Exception as error:  # of the user's model; a mixture's experts depend on values
            log.warning(
                "the model's operations could not be recorded (%s: %s): a prediction counts products of matrices only",
                type(error).__name__, str(error).strip().split("\n")[0][:200],
            )  # fmt: skip
            rows = next((leaf.numel() for leaf in args if isinstance(leaf, torch.Tensor)), 1)
            for group, seconds in self._products(times, rows, experts):
                found[group] += seconds
            return found, 0
        for (phase, group), operations in recording.counts.items():
            found[group] += times.of(phase, operations)
        return found, times.peak_bytes(recording.live_bytes)

    def _products(self, times: OperationTimes, rows: int, experts: ExpertUse | None) -> Iterator[tuple[int, float]]:
        """Yield the seconds of the products of matrices with this many rows, with their groups."""
        plan = self.fitting.plan
        layers = {id(of.parameter): len(of.recipes) for layer in plan.experts for of in layer}
        demanded = {group for groups in plan.demanded for group in groups}
        tables = {id(module.weight) for module in self.model.modules() if isinstance(module, nn.Embedding)}
        used = 0 if experts is None else experts.experts
        for group in plan.groups:
            for weight in group.weights:
                shape = weight.parameter.shape
                if len(shape) < 2 or id(weight.parameter) in tables:
                    continue
                count = layers.get(id(weight.parameter), self._experts_a_layer if group.index in demanded else 0)
                share = min(used * rows / count, rows) if count else rows
                seconds = times.product(max(round(share), 1), shape[-2], shape[-1], weight.recipe.dtype)
                yield group.index, seconds * min(count, used * rows) if id(weight.parameter) in layers else seconds

    def _making_seconds(self, times: OperationTimes) -> dict[int, float]:
        """Return what weights that are stored otherwise, or multiplied by parts, take in addition to their products, by group."""
        cuts = {id(linear.weight.parameter): linear for linear in self.fitting.plan.cuts}
        known: dict[Any, float] = {}
        found: dict[int, float] = {}
        for group in self.fitting.plan.groups:
            for weight in group.weights:
                linear = cuts.get(id(weight.parameter))
                if linear is None and weight.recipe.make is None:
                    continue
                parts = tuple((part.dtype, tuple(part.shape)) for part in weight.recipe.parts)
                kind = parts, weight.recipe.dtype, linear is None
                if kind not in known:
                    known[kind] = _made_seconds(weight) if linear is None else _parts_seconds(linear, times)
                found[group.index] = found.get(group.index, 0.0) + known[kind]
        return found

    @property
    def _experts_a_layer(self) -> int:
        """Experts of a layer that are modules of their own: as many in each layer."""
        lists = sum(are_experts(name, module) for name, module in self.model.named_modules())
        return len(self.fitting.plan.demanded) // max(lists, 1)

    def _on_demand(self, experts: ExpertUse | None, tokens: int) -> float:
        """Return the bytes of experts that a pass waits for."""
        plan = self.fitting.plan
        if experts is None:
            return 0.0
        layers = [(sum(of.stored_bytes for of in layer), len(layer[0].recipes)) for layer in plan.experts]
        if plan.demanded:  # modules of their own
            runs = [run for expert in plan.demanded for group in expert for run in plan.groups[group].runs]
            layers.append((sum(run.nbytes for run in runs), self._experts_a_layer))
        used = [min(experts.experts * tokens, count) / count * nbytes for nbytes, count in layers]
        return sum(used) * (1 - experts.hit_rate)

    def _pass(
        self,
        drive: DriveRates,
        paging: PagingCosts,
        resident_s: float,
        computing: dict[int, float],
        streamed: int | None,
        demanded_bytes: float,
    ) -> StepStats:
        """Predict a pass that reads `streamed` pages of each group at most; None: all, as the first one does.

        The use of a group whose pages all stay takes `resident_s`.
        """
        plan, placement = self.fitting.plan, self.fitting.placement
        sections = paged_sections(plan, placement.page_bytes)
        cuts = {id(linear.weight.parameter): linear for linear in plan.cuts}
        parts = {
            group.index: [
                nbytes for weight in group.weights if id(weight.parameter) in cuts
                for nbytes in cuts[id(weight.parameter)].part_bytes
            ]
            for group in plan.groups
        }  # fmt: skip
        tasks, kept = [], 0
        for group, of_group in enumerate(sections):
            pages = [page.index for section in of_group for page in section.pages] if group in plan.used_groups else []
            stays = 0 if streamed is None else max(len(pages) - streamed, 0)
            kept += stays
            accesses = [Access(("param", group), tuple(pages[stays:]))] if pages[stays:] else []
            tasks.append(Task("forward", group, accesses, parts=parts[group]))
        flat: list[Section] = [section for of_group in sections for section in of_group]
        stay = {task.group for task in tasks if not task.accesses and sections[task.group]} & plan.used_groups
        dry = DryRun(
            flat, placement.frame_count - kept, tasks, None, True, 0, {}, open_drive(drive, paging),
            lambda task: computing[task.group] + resident_s * (task.group in stay), parts_ahead=PARTS_IN_MEMORY,
        )  # fmt: skip
        if streamed is None:
            dry.step()
            step = dry.clock.stats()
        else:
            step = dry.time()
        used = {index for task in tasks for access in task.accesses for index in access.pages}
        nbytes = sum(page.nbytes for section in flat for page in section.pages if page.index in used)
        nbytes += int(sum(map(sum, parts.values())) + demanded_bytes)
        return _with_reads(step, nbytes, demanded_bytes / drive.allowed_read)


def plan_load(
    model: nn.Module,
    source: str | os.PathLike[str] | Source,
    *,
    host_memory: int | str = "auto",
    strict: bool = True,
    dtype: torch.dtype | None = None,
    rename: Rename = None,
) -> LoadPlan:
    """Return the plan of `swapper.load` with these arguments, for kernels on the CPU. Reads headers only, and changes nothing.

    Args:
        model, source, host_memory, strict, dtype, rename: as of `swapper.load`.

    Raises:
        As swapper.load, except errors that only transfers can cause.
    """
    opened = source if isinstance(source, Source) else open_source(source)
    host_bytes = parse_host_memory(host_memory)
    matched = match(model, opened, strict=strict, dtype=dtype, rename=rename)
    fitting = fit(build_streaming_plan(model, matched, opened.joined.keys()), host_bytes)
    return LoadPlan(model, matched, opened, host_bytes, fitting)


def _with_reads(step: StepStats, nbytes: int, wait_s: float) -> StepStats:
    """Return the pass with the bytes that it needs, not those read for the next one; and with a wait that no page has."""
    forward = step.phases["forward"]
    wall_s, read_wait_s = forward.wall_s + wait_s, forward.read_wait_s + wait_s
    forward = replace(forward, wall_s=wall_s, read_wait_s=read_wait_s, read_bytes={"param": nbytes})
    return replace(step, phases={**step.phases, "forward": forward})


def _tokens(batch: int, tokens: int) -> torch.Tensor:
    return torch.zeros(batch, tokens, dtype=torch.long, device="meta")


def _made_seconds(weight: Weight) -> float:
    """Return how long it takes to compute a weight from its parts."""
    shape = weight.parameter.shape
    rows = (
        weight.recipe.rows(0, min(-(-TRIAL_ELEMENTS * shape[0] // weight.parameter.numel()), shape[0])) or weight.recipe
    )
    parts = [torch.zeros(part.shape, dtype=part.dtype, device="cpu") for part in rows.parts]
    made = MadeMemory(weight.made_bytes)
    with torch.no_grad():
        numel = max(rows.from_parts(parts, made.empty).numel(), 1)
        return cold_seconds(lambda: rows.from_parts(parts, made.empty), TRIALS) / numel * weight.parameter.numel()


def _parts_seconds(linear: RowPartitionedLinear, times: OperationTimes) -> float:
    """Return what it takes to multiply a vector by parts of a matrix that are in memory, over the product with all of it."""
    outputs, inputs, dtype = linear.row_count, linear.columns, linear.weight.recipe.dtype
    memory = torch.zeros(PARTS_IN_MEMORY * linear.slot_bytes, dtype=torch.uint8, device="cpu")
    there = VirtualDrive()  # its reads are over at once
    made = MadeMemory(linear.made_bytes)
    parts = RowPrefetcher(memory, lambda stored, offset, into: there.read(into.nbytes, None), empty=made.empty)
    x = torch.zeros(1, inputs, dtype=dtype, device="cpu")
    with torch.no_grad():
        parts.multiply(linear, x)
        seconds = cold_seconds(lambda: parts.multiply(linear, x), TRIALS)
    return max(seconds - times.product(1, outputs, inputs, dtype), 0.0)

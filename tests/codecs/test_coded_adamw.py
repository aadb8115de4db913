"""AdamW over coded state: the reference's bits, near torch's own, and what it refuses or counts."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import codec_reference
import pytest
import torch
from coded import noise, parts_for, same

from swapper import _C, ConfigError
from swapper.codecs import CODECS, CodedState, adamw_
from swapper.codecs.codec import native_adamw_
from swapper.device.kernels import AdamWStep

EIGHT_BIT = ("master24", "moment8", "variance8")
COMBINATIONS = (
    EIGHT_BIT,
    ("split", "bf16", "bf16"),
    ("split", "fp32", "variance8"),
    ("fp32", "moment8", "fp32"),
    ("fp32", "fp32", "fp32"),
    (None, "moment8", "variance8"),
    (None, "fp32", "bf16"),
)
FLOATS = (torch.bfloat16, torch.float32)


@dataclass
class Slice:
    """Parameters, gradients, and coded state, masters first if there are any."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    states: list[CodedState]

    @classmethod
    def of(cls, combination: tuple[str | None, ...], count: int, gradient: torch.dtype = torch.bfloat16) -> Slice:
        values = (noise(count, 1, 1.0), noise(count, 2, 2.0) / 8, noise(count, 3, 2.0).square() / 64)
        parameter = values[0] if combination[0] is None else values[0].bfloat16()
        states = []
        for name, value in zip(combination, values, strict=True):
            if name is not None:
                parts = parts_for(CODECS[name], count)
                assert CODECS[name].encode(value, parts, parameter) == 0
                states.append(CodedState(CODECS[name], tuple(parts)))
        return cls(parameter, noise(count, 4, 1.0).to(gradient), states)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.parameter, *(part for state in self.states for part in state.parts)]

    @property
    def decoded(self) -> list[torch.Tensor]:
        return [codec_reference.decoded(state, self.parameter) for state in self.states]

    def update_(self, step: AdamWStep, factor: float = 1.0, threads: int = 1) -> int:
        master = self.states[0] if len(self.states) == 3 else None
        return adamw_(self.parameter, self.gradient, master, *self.states[-2:], step, factor=factor, threads=threads)


@pytest.mark.whole
@pytest.mark.parametrize("isa", _C.codec_isas())
@pytest.mark.parametrize("gradient", FLOATS)
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_the_kernels_give_the_references_bits(
    combination: tuple[str | None, ...], gradient: torch.dtype, isa: str
) -> None:
    for count in (1, 31, 1000, 1024, 20_011):
        found, wanted = (Slice.of(combination, count, gradient) for _ in range(2))
        for number in (1, 2, 30):
            step = AdamWStep(number, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
            named = [(state.codec.name, state.parts) for state in found.states]
            assert native_adamw_(found.parameter, found.gradient, named, step, 0.37, isa=isa) == 0
            assert codec_reference.adamw_(wanted.parameter, wanted.gradient, wanted.states, step, 0.37) == 0
        for one, other in zip(found.tensors, wanted.tensors, strict=True):
            same(one, other)


@pytest.mark.whole
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_threads_and_slices_change_no_bit(combination: tuple[str | None, ...]) -> None:
    count, step = 5 * (1 << 15) + 100, AdamWStep(3)
    whole, shared, cut = (Slice.of(combination, count) for _ in range(3))
    assert whole.update_(step) == shared.update_(step, threads=3) == 0
    for begin, end in ((0, 32), (32, 40_000), (40_000, count)):
        parameter, states = cut.parameter[begin:end], []
        for state in cut.states:
            parts = (
                part[begin // each.elements : -(-end // each.elements)]
                for part, each in zip(state.parts, state.codec.layout, strict=True)
            )
            states.append(CodedState(state.codec, tuple(parts)))
        assert Slice(parameter, cut.gradient[begin:end], states).update_(step) == 0
    for one, other, third in zip(whole.tensors, shared.tensors, cut.tensors, strict=True):
        same(other, one)
        same(third, one)


def trained(combination: tuple[str | None, ...], steps: int, maximize: bool = False) -> tuple[Slice, torch.Tensor]:
    """Return a slice after some steps from zero moments, and the parameters that torch's AdamW makes of the same."""
    part = Slice.of(combination, 4096)
    start = part.decoded[0] if len(part.states) == 3 else part.parameter.clone()
    for state in part.states[-2:]:
        state.codec.encode(torch.zeros(4096), state.parts)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, maximize=maximize)
    for number in range(1, steps + 1):
        part.gradient = (noise(4096, 4, 1.0) + noise(4096, 100 + number, 1.0)).bfloat16()
        parameter.grad = part.gradient.float()
        optimizer.step()
        step = AdamWStep(number, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
        assert part.update_(step, factor=-1.0 if maximize else 1.0) == 0
    return part, parameter.detach()


@pytest.mark.whole
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("combination", [("split", "fp32", "fp32"), (None, "fp32", "fp32")])
def test_exact_state_is_torchs_but_for_the_last_bits(combination: tuple[str | None, ...], maximize: bool) -> None:
    part, wanted = trained(combination, 20, maximize)
    master = part.decoded[0] if len(part.states) == 3 else part.parameter
    torch.testing.assert_close(master, wanted, rtol=3e-6, atol=3e-7)
    if len(part.states) == 3:
        same(part.parameter, master.bfloat16())


def test_eight_bits_stay_near_torchs() -> None:
    """Mean and worst distance from what torch makes of it, as parts of the way that the parameters went."""
    part, wanted = trained(EIGHT_BIT, 20)
    start = Slice.of(EIGHT_BIT, 4096).decoded[0]
    way = (wanted - start).abs().mean()
    distance = (part.decoded[0] - wanted).abs()
    assert way > 0.05
    assert distance.mean() < 0.01 * way
    assert distance.max() < 0.3 * way


def test_elements_that_cannot_be_held_are_counted() -> None:
    """A NaN stays in the exact ones, and is counted in each 8-bit moment."""
    for bad in (torch.nan, torch.inf):
        part = Slice.of(EIGHT_BIT, 1000)
        part.gradient[500] = bad
        assert part.update_(AdamWStep(1)) == 2
        master, exp_avg, exp_avg_sq = part.decoded
        assert int(master.isnan().sum()) == int(part.parameter.isnan().sum()) == 1
        assert exp_avg.isnan().nonzero().flatten().tolist() == list(range(480, 512))
        assert torch.equal(exp_avg.isnan(), exp_avg_sq.isnan())
        exact = Slice.of(("fp32", "fp32", "fp32"), 1000)
        exact.gradient[500] = bad
        assert exact.update_(AdamWStep(1)) == 0


def test_no_elements_are_no_work() -> None:
    assert Slice.of(EIGHT_BIT, 0).update_(AdamWStep(1)) == 0


def test_what_does_not_fit_is_refused() -> None:
    def refused(match: str, **changes: object) -> None:
        part = Slice.of(EIGHT_BIT, 64)
        given = {
            "parameter": part.parameter,
            "gradient": part.gradient,
            "master": part.states[0],
            "exp_avg": part.states[1],
            "exp_avg_sq": part.states[2],
            "step": AdamWStep(1),
        }
        before = [tensor.clone() for tensor in part.tensors]
        with pytest.raises(ConfigError, match=match):
            adamw_(**{**given, **changes})  # type: ignore[arg-type]
        for tensor, old in zip(part.tensors, before, strict=True):
            same(tensor, old)

    refused("gradients", gradient=torch.zeros(63))
    refused("bf16 or fp32", gradient=torch.zeros(64).half())
    refused("bf16 or fp32", gradient=torch.zeros(128)[::2])
    refused("host memory", parameter=torch.zeros(64, device="meta").bfloat16())
    refused("masters", master=None)
    refused("masters", parameter=torch.zeros(64))
    refused("moment8", exp_avg=CodedState(CODECS["moment8"], (torch.zeros(64),)))
    refused("complete", exp_avg=Slice.of(EIGHT_BIT, 64).states[0])
    refused("seed", step=AdamWStep(1, seed=3))
    refused("bf16 or fp32", parameter=torch.zeros(64).half())


WORKS_ON_TORCHS_THREADS = """
import os
import torch
from swapper.codecs import CODECS, CodedState, adamw_
from swapper.device.kernels import AdamWStep

def turns():
    return {task: int(open(f"/proc/self/task/{task}/schedstat").read().split()[2]) for task in os.listdir("/proc/self/task")}

torch.set_num_threads(2)
before = set(os.listdir("/proc/self/task"))
torch.ones(1 << 22).add_(1)  # OpenMP's second thread begins, and sleeps
(other,) = {task for task in os.listdir("/proc/self/task") if task not in before}
state = [CodedState(CODECS["fp32"], (torch.zeros(1 << 22),)) for _ in range(2)]
asleep = turns()[other]
adamw_(torch.zeros(1 << 22), torch.ones(1 << 22), None, *state, AdamWStep(1, 1e-3, (0.9, 0.99), 1e-8, 0.0), threads=2)
assert turns()[other] > asleep, "the pass began threads of its own"
"""


def test_a_pass_runs_on_torchs_own_threads() -> None:
    """Threads of ours would share the processors with OpenMP's, which spin after each of torch's operations."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, "-c", WORKS_ON_TORCHS_THREADS], env=environment, stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 0, done.stderr

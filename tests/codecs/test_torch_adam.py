"""One pass with the bits of torch.optim's Adam and AdamW: any settings, dtypes, codecs, instruction sets, threads, values."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import codec_reference
import pytest
import torch
from coded import SPECIAL, bits_of, floats_of, noise, parts_for, same
from torch.optim import Adam, AdamW

from swapper import _C, ConfigError
from swapper.codecs import CODECS, CodedState
from swapper.codecs.codec import native_torch_adam_
from swapper.codecs.coded_adamw import TorchAdamStep, torch_adam_
from swapper.train.optimizer.optimizer_set import kind_of
from swapper.train.updates.one_pass import find_arithmetic, find_torchs_pass, step_of

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": partial(AdamW, lr=1e-3),
    "AdamW without decay": partial(AdamW, lr=3e-3, weight_decay=0.0, betas=(0.9, 0.95)),
    "AdamW to a maximum": partial(AdamW, lr=1, weight_decay=0.5, maximize=True, eps=1e-3),
    "AdamW by tensors in a list": partial(AdamW, lr=1e-3, foreach=True),
    "Adam": partial(Adam, lr=1e-3),
    "Adam with decay": partial(Adam, lr=1e-3, weight_decay=0.1, betas=(0.4, 0.3), eps=1e-6),
    "Adam to a maximum": partial(Adam, lr=1e-2, weight_decay=0.1, betas=(0.0, 0.999), maximize=True),
    "Adam, decoupled": partial(Adam, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True),
}
KINDS = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, "fp32"),
    "fp16": (torch.float16, "fp32"),
    "split": (torch.bfloat16, "split"),
}
"""Dtypes of parameters, and codecs of masters."""


@dataclass
class Slice:
    """Parameters and coded state, as the pass has them, and plain torch's with the same values."""

    parameter: torch.Tensor
    states: dict[str, CodedState]
    optimizer: Any
    plain: torch.Tensor
    masters: torch.Tensor

    @classmethod
    def of(cls, make: Callable[..., Any], kind: str, masters: torch.Tensor) -> Slice:
        dtype, codec = KINDS[kind]
        plain = masters.clone().requires_grad_()
        count, parameter, states = masters.numel(), masters.to(dtype), {}
        if codec is not None:
            states["master"] = CodedState(CODECS[codec], tuple(parts_for(CODECS[codec], count)))
            states["master"].codec.encode(masters, states["master"].parts, parameter)
        for key in ("exp_avg", "exp_avg_sq"):
            states[key] = CodedState(CODECS["fp32"], (torch.zeros(count),))
        return cls(parameter if codec is not None else masters.clone(), states, make([plain]), plain, masters)

    def step(self, number: int, gradient: torch.Tensor, threads: int = 1, isa: str = "") -> None:
        """Take a step with both."""
        self.plain.grad = gradient.float()
        self.optimizer.step()
        arithmetic = find_arithmetic()
        assert arithmetic is not None
        numbers = step_of(number, self.optimizer.param_groups[0]).numbers
        named = [(state.codec.name, state.parts) for state in self.states.values()]
        ways = arithmetic.uses_fma, arithmetic.roots
        assert native_torch_adam_(self.parameter, gradient, named, numbers, *ways, threads, isa) == 0

    def check(self) -> None:
        """Compare them, bit for bit."""
        wanted = {**self.optimizer.state[self.plain], "master": self.plain.detach()}
        for key, state in self.states.items():
            equal(codec_reference.decoded(state, self.parameter), wanted[key])
        equal(self.parameter, wanted["master"].to(self.parameter.dtype))


def equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal in every bit, of NaNs in being one."""
    assert torch.equal(found.isnan(), wanted.isnan())
    numbers = ~wanted.isnan()
    same(found[numbers], wanted[numbers])


def test_this_processors_arithmetic_is_known() -> None:
    assert find_arithmetic() is not None


@pytest.mark.parametrize("isa", _C.codec_isas())
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_bits_are_torchs(optimizer: str, kind: str, isa: str) -> None:
    for count in (1, 31, 1000, 1024, 40_011):
        part = Slice.of(OPTIMIZERS[optimizer], kind, noise(count, 1, 2.0))
        for number in (1, 2, 3):
            part.step(number, noise(count, 10 + number, 4.0).to(part.parameter.dtype), isa=isa)
        part.check()


@pytest.mark.parametrize("isa", _C.codec_isas())
@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["AdamW", "Adam with decay", "Adam to a maximum"])
def test_any_values_give_torchs_bits(optimizer: str, kind: str, isa: str) -> None:
    """Subnormal numbers, infinities, NaN, overflow: in parameters and in gradients, with each other."""
    special, generator = floats_of(SPECIAL), torch.Generator().manual_seed(3)
    count = 1 << 15
    bits = torch.randint(-(1 << 31), 1 << 31, (3, count), generator=generator).int().view(torch.float32)
    values = torch.where(
        torch.rand(3, count, generator=generator) < 0.3, special[bits_of(bits).long() % len(special)], bits
    )
    part = Slice.of(OPTIMIZERS[optimizer], kind, values[0])
    for number in (1, 2):
        part.step(number, values[number].to(part.parameter.dtype), isa=isa)
    part.check()


@pytest.mark.parametrize("isa", _C.codec_isas())
def test_every_gradient_in_fp16_and_rounding_to_it(isa: str) -> None:
    gradient = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    halves = gradient.float()  # and what is next to them, and half-way
    bits = bits_of(halves)
    for between in (0, 1, -1, 0x0FFF, 0x1000, 0x1001):
        part = Slice.of(partial(AdamW, lr=0.0), "fp16", (bits + between).view(torch.float32))
        part.step(1, gradient, isa=isa)
        part.check()


def test_threads_and_pieces_change_no_bit() -> None:
    count, make = 5 * (1 << 15) + 100, OPTIMIZERS["AdamW"]
    gradient = noise(count, 2, 2.0).bfloat16()
    whole, shared, cut = (Slice.of(make, "bf16", noise(count, 1, 2.0)) for _ in range(3))
    whole.step(1, gradient)
    shared.step(1, gradient, threads=3)
    for begin, end in ((0, 64), (64, 40_000), (40_000, count)):
        states = {key: CodedState(state.codec, (state.parts[0][begin:end],)) for key, state in cut.states.items()}
        piece = Slice(cut.parameter[begin:end], states, make([torch.zeros(end - begin)]), cut.plain, cut.masters)
        piece.plain = piece.optimizer.param_groups[0]["params"][0]
        piece.step(1, gradient[begin:end])
    for part in (whole, shared, cut):
        part.optimizer, part.plain = whole.optimizer, whole.plain
        part.check()


@pytest.mark.parametrize("lossy", [("master24", "moment8", "variance8"), ("split", "bf16", "bf16")])
def test_codes_are_those_of_codecs_around_the_optimizer(lossy: tuple[str, ...]) -> None:
    count = 5_000
    masters = noise(count, 1, 1.0)
    parameter, arithmetic = masters.bfloat16(), find_arithmetic()
    assert arithmetic is not None
    states = [CodedState(CODECS[name], tuple(parts_for(CODECS[name], count))) for name in lossy]
    for state, value in zip(states, (masters, torch.zeros(count), torch.zeros(count)), strict=True):
        state.codec.encode(value, state.parts, parameter)
    plain = codec_reference.decoded(states[0], parameter).requires_grad_()
    optimizer = Adam([plain], lr=1e-2, weight_decay=0.1)
    for number in (1, 2, 3):
        gradient = noise(count, 5 + number, 1.0).bfloat16()
        plain.grad = gradient.float()
        optimizer.step()
        found = optimizer.state[plain]
        rounded, wanted = plain.detach().bfloat16(), []
        for state, value in zip(states, (plain.detach(), found["exp_avg"], found["exp_avg_sq"]), strict=True):
            wanted.append(parts_for(state.codec, count))
            assert state.codec.encode(value, wanted[-1], rounded) == 0
            state.codec.decode(wanted[-1], value, rounded)  # the next step begins with what is stored
        assert torch_adam_(parameter, gradient, *states, step_of(number, optimizer.param_groups[0]), arithmetic) == 0
        same(parameter, rounded)
        for state, parts in zip(states, wanted, strict=True):
            for one, other in zip(state.parts, parts, strict=True):
                same(one, other)


CAPABILITIES = ["default", *[name for name in ("avx2", "avx512") if name in _C.codec_isas()]]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_torchs_own_instruction_sets_are_told_apart(capability: str) -> None:
    """As torch uses them on other processors."""
    if os.uname().machine != "x86_64":
        pytest.skip("torch has one there")
    text = (
        "import torch; from swapper.train.updates.one_pass import find_arithmetic; "
        "print(torch.backends.cpu.get_cpu_capability(), find_arithmetic().uses_fma)"
    )
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [capability.upper(), str(capability != "default")]


class OwnAdamW(AdamW):
    """May do anything."""


def test_what_the_pass_does_not_have_is_the_optimizers() -> None:
    for make, has_pass in (
        (partial(AdamW), True),
        (partial(Adam, lr=1, maximize=True), True),
        (partial(AdamW, foreach=True), True),
        (partial(AdamW, fused=False), True),
        (OwnAdamW, False),
        (partial(AdamW, amsgrad=True), False),
        (partial(AdamW, fused=True), False),
        (partial(AdamW, capturable=True), False),
        (partial(AdamW, differentiable=True), False),
        (partial(AdamW, lr=torch.tensor(1e-3)), False),
        (partial(AdamW, lr=1e30), False),
        (partial(AdamW, betas=(torch.tensor(0.9), torch.tensor(0.99))), False),
        (torch.optim.NAdam, False),
    ):
        optimizer = make([torch.zeros(1)])
        found = find_torchs_pass(kind_of(optimizer), optimizer.param_groups[0])
        assert (found is not None) == has_pass, optimizer


def test_it_is_the_optimizers_while_torch_flushes_subnormal_numbers() -> None:
    optimizer = AdamW([torch.zeros(1)])
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        found = find_torchs_pass(kind_of(optimizer), optimizer.param_groups[0])
    finally:
        torch.set_flush_denormal(False)
    assert found is None
    assert find_torchs_pass(kind_of(optimizer), optimizer.param_groups[0]) is not None


def test_what_does_not_fit_is_refused() -> None:
    arithmetic = find_arithmetic()
    assert arithmetic is not None
    step = TorchAdamStep(1, 1e-3, (0.9, 0.99), 1e-8, 0.1, True)

    def refused(match: str, **changes: Any) -> None:
        part = Slice.of(OPTIMIZERS["AdamW"], "bf16", noise(64, 1, 1.0))
        given = {"parameter": part.parameter, "gradient": torch.zeros(64), **part.states, **changes}
        before = [part.parameter.clone(), *(state.parts[0].clone() for state in part.states.values())]
        with pytest.raises(ConfigError, match=match):
            torch_adam_(**given, step=step, arithmetic=arithmetic)
        for tensor, old in zip([part.parameter, *(s.parts[0] for s in part.states.values())], before, strict=True):
            same(tensor, old)

    refused("gradients", gradient=torch.zeros(63))
    refused("fp32 or bf16 or fp16", gradient=torch.zeros(64).double())
    refused("fp32 or bf16 or fp16", gradient=torch.zeros(128)[::2])
    refused("masters", master=None)
    refused("masters", parameter=torch.zeros(64))
    refused("fp32", exp_avg=CodedState(CODECS["fp32"], (torch.zeros(63),)))

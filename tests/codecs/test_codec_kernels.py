"""The kernels give the reference's bits: in each instruction set of this processor, at any size and address, by any threads."""

from __future__ import annotations

import pytest
import torch
from coded import NAMES, coded, decoded, parts_for, patterns, same, values_for
from hypothesis import given

from swapper import _C, ConfigError
from swapper.codecs import CODECS
from swapper.codecs.codec import native_decode, native_encode

ISAS = _C.codec_isas()
KINDS = ("alike", "spread", "tiny", "any")


def check(name: str, value: torch.Tensor, isa: str, threads: int = 1) -> None:
    codec, parameter = CODECS[name], value.bfloat16()
    wanted, unheld = coded(codec, value, parameter)
    parts = parts_for(codec, value.numel(), fill=55)
    assert native_encode(name, value, parts, parameter, threads, isa) == unheld
    for part, other in zip(parts, wanted, strict=True):
        same(part, other)
    found = torch.empty_like(value)
    native_decode(name, wanted, found, parameter, threads, isa)
    same(found, decoded(codec, wanted, parameter))


def test_every_instruction_set_of_the_processor_is_listed() -> None:
    assert ISAS[-1] == "baseline"
    flags = torch.backends.cpu.get_cpu_capability()
    assert ("avx2" in ISAS) == flags.startswith("AVX") and ("avx512" in ISAS) >= (flags == "AVX512")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_many_values(name: str, kind: str, isa: str) -> None:
    for count in (1, 8, 31, 32, 33, 1024, 100_003):
        check(name, values_for(name, kind, count), isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", NAMES)
@given(values=patterns())
def test_any_values(name: str, isa: str, values: torch.Tensor) -> None:
    check(name, values, isa)


@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_threads(name: str) -> None:
    value = values_for(name, "any", 3 * (1 << 17) + 17)
    for threads in (2, 16):
        check(name, value, "", threads)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["split", "master24"])
def test_parameters_that_do_not_fit_their_masters(name: str, isa: str) -> None:
    value = values_for(name, "any", 10_000)
    parameter = values_for(name, "any", 10_001)[:10_000].bfloat16()
    wanted, unheld = coded(CODECS[name], value, parameter)
    parts = parts_for(CODECS[name], 10_000)
    assert native_encode(name, value, parts, parameter, isa=isa) == unheld > 9000
    for part, other in zip(parts, wanted, strict=True):
        same(part, other)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_outside_of_the_parts_is_written_at_any_alignment(name: str, isa: str) -> None:
    codec = CODECS[name]
    for count in (45, 64, 71):
        value = torch.cat([torch.ones(3), values_for(name, "alike", count), torch.ones(3)])[3:-3]
        parameter = torch.cat([torch.ones(1), value]).bfloat16()[1:]
        wanted = coded(codec, value, parameter)[0]
        memory = [torch.full((part.numel() + 10,), 55, dtype=part.dtype) for part in wanted]
        assert native_encode(name, value, [part[5:-5] for part in memory], parameter, isa=isa) == 0
        for part, other in zip(memory, wanted, strict=True):
            border = torch.full((5,), 55, dtype=part.dtype)
            same(part, torch.cat([border, other, border]))
        room = torch.full((count + 10,), 55.0)
        native_decode(name, [part[5:-5] for part in memory], room[5:-5], parameter, isa=isa)
        same(room, torch.cat([torch.full((5,), 55.0), decoded(codec, wanted, parameter), torch.full((5,), 55.0)]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["moment8", "variance8"])
def test_subnormal_numbers_count_even_if_torch_flushes_them(name: str, isa: str) -> None:
    value = values_for(name, "tiny", 1000)
    assert bool(((value != 0) & (value.abs() < 2.0**-126)).any())
    wanted = coded(CODECS[name], value, value)[0]
    expected = decoded(CODECS[name], wanted, value)
    parts, found = parts_for(CODECS[name], 1000), torch.empty(1000)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        native_encode(name, value, parts, None, isa=isa)
        native_decode(name, parts, found, None, isa=isa)
        is_still_set = float(torch.tensor([1e-40]) * 1.0) == 0
    finally:
        torch.set_flush_denormal(False)
    for part, other in zip(parts, wanted, strict=True):
        same(part, other)
    same(found, expected)
    assert is_still_set, "the caller's own setting is put back"


def test_unknown_names_are_refused() -> None:
    value = torch.zeros(32)
    for act, message in (
        (lambda: native_encode("no such codec", value, [value], None), "no such codec"),
        (lambda: native_encode("fp32", value, [value], None, isa="mmx"), "mmx"),
        (lambda: native_encode("moment8", value, [value], None), "parts"),
        (lambda: native_encode("split", value, [value, value], None), "parameter"),
    ):
        with pytest.raises(ConfigError, match=message):
            act()

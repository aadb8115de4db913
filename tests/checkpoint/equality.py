"""Compares two loaded objects bit for bit, views and all."""

from __future__ import annotations

from typing import Any

import torch


def bytes_of(tensor: torch.Tensor) -> bytes:
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def assert_same(a: Any, b: Any) -> None:
    """Raise unless `a` and `b` are alike, and their tensors share storages alike."""
    shared: dict[int, int] = {}
    _compare(a, b, shared)
    assert len(set(shared.values())) == len(shared)


def _compare(a: Any, b: Any, shared: dict[int, int]) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        _compare_tensors(a, b, shared)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            _compare(a[key], b[key], shared)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            _compare(x, y, shared)
    else:
        assert a == b


def _compare_tensors(a: torch.Tensor, b: torch.Tensor, shared: dict[int, int]) -> None:
    assert (a.dtype, a.shape, a.layout, a.requires_grad) == (b.dtype, b.shape, b.layout, b.requires_grad)
    if a.layout is not torch.strided:
        _compare_tensors(a.to_dense(), b.to_dense(), {})
        return
    if a.is_quantized:
        assert torch.equal(a.dequantize(), b.dequantize())
        return
    assert (a.stride(), a.storage_offset(), a.is_conj()) == (b.stride(), b.storage_offset(), b.is_conj())
    assert bytes_of(a) == bytes_of(b)
    if a.untyped_storage().nbytes():
        one, other = a.untyped_storage(), b.untyped_storage()
        assert one.nbytes() == other.nbytes()
        assert shared.setdefault(one.data_ptr(), other.data_ptr()) == other.data_ptr()

"""Containers in memory that tests make: payloads, the state that uses them, and whether what was loaded is that."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from swapper.formats.container import ALIGNMENT, ChecksumChunk, ContainerLayout, PreparedTail
from swapper.formats.torch_writer import StorageRef

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.uint32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def random_payload(nbytes: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    limit = 2 if dtype is torch.bool else 256
    return torch.randint(0, limit, (nbytes,), dtype=torch.uint8, generator=generator).view(dtype)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def build_tail(
    layout: ContainerLayout,
    obj: object,
    locate: Callable[[torch.Tensor], StorageRef | None],
    crc32s: Mapping[str, int],
) -> bytes:
    """The whole tail of a container, of the CRC-32 of each payload."""
    chunks = [ChecksumChunk(record.offset, record.nbytes, crc32s[record.key]) for record in layout.records]
    return PreparedTail(layout, obj, locate).build(chunks)


class Content:
    """Payload storages in memory, one for each record, and what a container needs to know of them."""

    def __init__(self, payloads: list[torch.Tensor]) -> None:
        self.payloads = payloads
        self.layout = ContainerLayout.plan([payload.nbytes for payload in payloads])
        self.crc32s = {str(index): zlib.crc32(bytes_of(payload)) for index, payload in enumerate(payloads)}
        self._keys = {p.untyped_storage().data_ptr(): str(index) for index, p in enumerate(payloads)}

    def locate(self, tensor: torch.Tensor) -> StorageRef | None:
        key = self._keys.get(tensor.untyped_storage().data_ptr())
        return None if key is None else StorageRef(key, tensor.storage_offset())

    def write(self, path: Path, state: object, with_crc32s: bool = False) -> Path:
        """As the manager will: headers and payloads, and the tail last; or, `with_crc32s`, with descriptors as torch has them."""
        with path.open("wb") as file:
            for offset, chunk in self.layout.headers():
                file.seek(offset)
                file.write(chunk)
            for record, payload in zip(self.layout.records, self.payloads, strict=True):
                file.seek(record.offset)
                file.write(bytes_of(payload))
                if with_crc32s and record.end != self.layout.tail_offset:
                    file.seek(record.end + 4)  # behind the descriptor's signature
                    file.write(self.crc32s[record.key].to_bytes(4, "little"))
            file.seek(self.layout.tail_offset)
            file.write(build_tail(self.layout, state, self.locate, self.crc32s))
        return path


def assert_equal(loaded: object, state: object) -> None:
    """Same types, same nest, tensors equal bit for bit with the same dtype, shape and stride."""
    assert type(loaded) is type(state)
    if isinstance(state, torch.Tensor):
        assert (loaded.dtype, loaded.shape, loaded.stride()) == (state.dtype, state.shape, state.stride())
        assert not loaded.requires_grad
        assert bytes_of(loaded) == bytes_of(state)
    elif isinstance(state, dict):
        assert list(loaded) == list(state)
        assert getattr(loaded, "_metadata", None) == getattr(state, "_metadata", None)
        for key, value in state.items():
            assert_equal(loaded[key], value)
    elif isinstance(state, (list, tuple)):
        assert len(loaded) == len(state)
        for item, value in zip(loaded, state, strict=True):
            assert_equal(item, value)
    else:
        assert loaded == state


def example() -> tuple[Content, OrderedDict]:
    """Many dtypes; views at 64-byte steps, strided and 0-dim; resident tensors between, shared and empty."""
    content = Content([random_payload(ALIGNMENT * (1 + i % 3), dtype, i) for i, dtype in enumerate(DTYPES)])
    state: OrderedDict = OrderedDict()
    resident = random_payload(800, torch.float32, 99)
    for index, payload in enumerate(content.payloads):
        step = 64 // payload.element_size()
        state[f"{index}.weight"] = payload[:step].view(2, -1)
        state[f"{index}.transposed"] = payload[step : 2 * step].view(2, -1).t()
        state[f"{index}.step"] = payload[3 * step]
        state[f"{index}.all"] = payload
        state[f"{index}.resident"] = resident[index : index + 3]
        state[f"{index}.empty"] = torch.empty(0, 3)
    state["numbers"] = {"lr": 1e-3, "betas": (0.9, 0.95), "step": 12, "big": 1 << 80, "none": None, 7: [True]}
    state["rng"] = torch.get_rng_state()
    state["dtype"] = torch.bfloat16
    state._metadata = OrderedDict({"": {"version": 1}})
    return content, state

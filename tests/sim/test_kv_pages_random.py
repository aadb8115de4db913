"""Random use of keys and values in pages gives what plain tensors give, whatever the pool; its invariants hold throughout.

So it is on a device whose copies come late, whatever stays there, and block by block.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from infer.host_device import ORDERS, HostDevice
from sampling import examples

from swapper.device.model_device import DeviceBudget
from swapper.infer.kv import kv_blocks, kv_device, kv_device_blocks
from swapper.infer.kv.kv_pages import KeyValuePages
from swapper.infer.kv.kv_rows import PADDING_BYTES, RowShape
from swapper.runtime.counters import Counters

ROW_LIMIT = 400


def counters() -> Counters:
    return Counters(read_bytes={"kv": 0}, written_bytes={"kv": 0})


SEEDS = examples(48)


class Twin:
    """The rows of one layer, and the same in ordinary memory."""

    def __init__(
        self, pages: KeyValuePages, index: int, shape: RowShape, kept: int | None, by_blocks: bool = False
    ) -> None:
        self.pages, self.index, self.kept, self.by_blocks = pages, index, kept, by_blocks
        self.rows = pages.open_rows(index, shape, 60, kept)
        self.empty()

    def empty(self) -> None:
        shape = self.rows.shape
        self.keys, self.values = (
            torch.empty(shape.batch, heads, 0, width, dtype=shape.dtype) for heads, width in (shape.key, shape.value)
        )

    def append(self, random: Random, count: int) -> None:
        shape, pages = self.rows.shape, self.pages
        new = [
            torch.empty(shape.batch, heads, count, width).uniform_(-1, 1).to(shape.dtype)
            for heads, width in (shape.key, shape.value)
        ]
        if self.rows.end + count > self.rows.capacity:
            if self.rows.count + count <= self.rows.capacity and random.random() < 0.5:
                pages.rewrite(self.rows, self.rows)
            else:
                self.move(2 * (self.rows.count + count), shape, None)
        if self.by_blocks:
            before = self.rows.begin, self.rows.end
            pages.add(self.rows, *new)
            self.check_blocks(*before)
            self.keys, self.values = torch.cat([self.keys, new[0]], 2), torch.cat([self.values, new[1]], 2)
        else:
            found = pages.append(self.rows, *new)
            self.keys, self.values = torch.cat([self.keys, new[0]], 2), torch.cat([self.values, new[1]], 2)
            assert torch.equal(found[0], self.keys)
            assert torch.equal(found[1], self.values)
        if self.kept is not None:
            self.keys, self.values = self.keys[:, :, -self.kept :], self.values[:, :, -self.kept :]

    def check_blocks(self, begin: int, end: int) -> None:
        """Compare tokens [begin, end), which were there before this turn, block by block."""
        place = 0
        for keys, values in self.pages.blocks(self.rows, begin, end):
            last = place + keys.shape[2]
            assert torch.equal(keys, self.keys[:, :, place:last])
            assert torch.equal(values, self.values[:, :, place:last])
            place = last
        assert place == end - begin

    def move(self, capacity: int, shape: RowShape, pick: torch.Tensor | None) -> None:
        self.rows = self.pages.move_rows(self.rows, shape, capacity, pick)

    def pick(self, random: Random) -> None:
        shape = self.rows.shape
        entries = torch.tensor([random.randrange(shape.batch) for _ in range(random.randint(1, 3))])
        if len(entries) == shape.batch:
            self.pages.rewrite(self.rows, self.rows, entries)
        else:
            self.move(self.rows.capacity, shape.with_batch(len(entries)), entries)
        self.keys, self.values = self.keys[entries], self.values[entries]

    def crop(self, count: int) -> None:
        self.pages.crop(self.rows, count)
        left = self.keys.shape[2] - min(count, self.keys.shape[2])
        self.keys, self.values = self.keys[:, :, :left], self.values[:, :, :left]

    def check_saved(self) -> None:
        """Compare the bytes of a saved context."""
        if self.rows.count:
            memory = torch.cat([piece.clone() for piece in self.pages.pieces(self.rows, self.rows.count)])
            shape = self.rows.shape
            assert not memory.view(-1, shape.nbytes)[:, shape.nbytes - shape.padding :].any()
            keys, values = self.rows.shape.views(memory, 0, self.rows.count)
            assert torch.equal(keys, self.keys)
            assert torch.equal(values, self.values)

    def check(self) -> None:
        keys, values = self.pages.read(self.rows)
        assert torch.equal(keys, self.keys)
        assert torch.equal(values, self.values)


@pytest.mark.parametrize("where", ["cpu", "blocks", *ORDERS, *(f"{order}, blocks" for order in ORDERS)])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_use(seed: int, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(seed)
    torch.manual_seed(seed)
    dtype = random.choice([torch.float32, torch.bfloat16])
    layer_count = random.randint(1, 6)
    host_bytes = random.choice([2, 4]) << 20
    device_bytes = int(random.choice([1.2, 3, 6, 12]) * (1 << 20))
    monkeypatch.setattr(kv_device, "PACKED_BYTES", random.choice([0, 1 << 13, 1 << 20]))
    by_blocks, order = where.endswith("blocks"), where.removesuffix(", blocks")
    for module in (kv_blocks, kv_device_blocks):
        monkeypatch.setattr(module, "MAX_BLOCK_TOKENS", random.choice([7, 50, 2048]))
    if by_blocks:
        device_bytes //= random.choice([1, 8, 40])
    budget = DeviceBudget(HostDevice(order), device_bytes) if order in ORDERS else None
    pages = KeyValuePages(host_bytes, tmp_path, None, layer_count, "auto", counters(), budget, by_blocks)
    shapes = [
        RowShape(
            random.randint(1, 2),
            (2, random.choice([16, 40, 64])),
            (random.randint(1, 3), 64),
            dtype,
            random.choice([0, PADDING_BYTES]),
        )
        for _ in range(layer_count)
    ]
    if random.random() < 0.7:
        shapes = shapes[:1] * layer_count
    kept = [random.choice([None, None, 30]) for _ in range(layer_count)]
    twins = [Twin(pages, n, *pair, by_blocks) for n, pair in enumerate(zip(shapes, kept, strict=True))]
    try:
        for _ in range(40):
            what = random.choice(["step"] * 6 + ["long step", "crop", "pick", "check", "save", "close"])
            if what in ("step", "long step"):
                count = 1 if what == "step" else random.randint(2, 90)
                for twin in twins:
                    if twin.rows.count + count <= ROW_LIMIT:
                        twin.append(random, count)
            elif what == "crop":
                count = random.randint(1, 20)
                for twin in twins:
                    twin.crop(count)
            elif what == "pick" and all(twin.rows.count for twin in twins):
                for twin in twins:
                    twin.pick(random)
            elif what == "check":
                for twin in twins:
                    twin.check()
            elif what == "save":
                for twin in twins:
                    twin.check_saved()
            elif what == "close" and random.random() < 0.3:
                twin = random.choice(twins)
                pages.close_rows(twin.rows)
                twin.rows = pages.open_rows(twin.index, twin.rows.shape, 60, twin.kept)
                twin.empty()
            pages.pager.check()
        for twin in twins:
            twin.check()
    finally:
        pages.close()

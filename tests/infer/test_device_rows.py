"""Rows of embeddings go to the device by page-locked memory and the stream of copies: only the kernels that use them wait."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import swapper
from infer.host_device import ORDERS, HostDevice
from swapper.device.copies import NewCopies
from swapper.infer import weight_rows

MIB = 1 << 20
ROWS, WIDTH = 8192, 512
IDS = torch.tensor([[5, 6, 7, 7, 4000], [0, ROWS - 1, 5, 12, 6]])


class Looks(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, ids):
        return self.head(self.table(ids))


@pytest.fixture
def looks(tmp_path):
    """A model whose table is larger than the device's budget, and the same in memory."""
    opened = []

    def load(device):
        torch.manual_seed(0)
        reference = Looks()
        torch.save(reference.state_dict(), tmp_path / "model.pt")
        with torch.device("meta"):
            model = Looks()
        opened.append(
            swapper.load(model, tmp_path / "model.pt", host_memory="8MiB", device=device, device_memory="4MiB")
        )
        return reference, opened[-1], swapper.loaded(opened[-1])

    yield load
    for model in opened:
        swapper.loaded(model).unload()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ids", [IDS, IDS[:, :1], IDS[:, :0], torch.arange(ROWS).view(4, -1)], ids=len)
def test_rows_are_those_of_the_table(looks, order, ids):
    reference, model, _ = looks(HostDevice(order))
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(ids), reference(ids))


def test_python_waits_for_no_copy_and_each_row_is_sent_once(looks, monkeypatch):
    device = HostDevice("late")
    reference, model, loaded = looks(device)
    with torch.no_grad():
        model(IDS)
        before, waits = loaded.counters.uploaded_bytes, []
        for name in ("wait_for", "synchronize"):
            wait = getattr(device, name)
            monkeypatch.setattr(device, name, lambda *args, wait=wait: (waits.append(args), wait(*args))[1])
        assert torch.equal(model.table(IDS), reference.table(IDS))
    assert not waits
    assert loaded.counters.uploaded_bytes - before == IDS.unique().numel() * WIDTH * 4


def test_the_memory_of_rows_is_page_locked(looks, monkeypatch):
    device, asked = HostDevice("late"), []
    empty = device.empty_on_host
    monkeypatch.setattr(device, "empty_on_host", lambda nbytes: (asked.append(nbytes), empty(nbytes))[1])
    _, model, _ = looks(device)
    with torch.no_grad():
        model(IDS)
    assert asked == [IDS.unique().numel() * WIDTH * 4]


def test_a_kernel_that_does_not_wait_for_its_rows_is_noticed(looks, monkeypatch):
    def no_wait(copies, tables):
        copy = copies.send(tables)
        return [copy.memory[at : at + table.numel()] for at, table in zip(copy.offsets, tables, strict=True)]

    reference, model, _ = looks(HostDevice("late"))
    monkeypatch.setattr(weight_rows, "_there", no_wait)
    with torch.no_grad():
        assert not torch.equal(model(IDS), reference(IDS))


def test_memory_of_rows_is_kept_until_its_copy_is_over(looks, monkeypatch):
    _, model, loaded = looks(HostDevice("late"))
    copies, send = loaded._on_device.copies, NewCopies.send

    def forgetful(self, sources, *others):
        copy = send(self, sources, *others)
        sources[0].fill_(1)  # as the next owner of the memory does
        self._in_flight.clear()
        return copy

    monkeypatch.setattr(NewCopies, "send", forgetful)
    with torch.no_grad(), pytest.raises(AssertionError, match=r"was changed before its copy was over"):
        model(IDS)
    copies._stream.done = len(copies._stream.operations)

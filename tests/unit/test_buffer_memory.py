"""Memory of FSDP2's buffers: places are used again when their buffers die, and unsharded parameters come and go in it."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch

from swapper.train.sharded.buffers import BufferMemory, EmptyTensors, _Unsharded, may_lend

PAGE = mmap.PAGESIZE


def test_a_place_is_free_when_the_last_tensor_that_shows_it_is_dropped() -> None:
    memory = BufferMemory(4 * PAGE)
    first, second = memory.allocate(2 * PAGE), memory.allocate(2 * PAGE)
    assert first is not None and second is not None
    first.fill_(1)
    second.fill_(2)
    assert memory.allocate(1) is None
    address, view = first.data_ptr(), first[PAGE:].view(torch.int32)
    del first
    assert memory.allocate(1) is None and view.eq(0x01010101).all()
    del view
    again = memory.allocate(2 * PAGE)
    assert again is not None and again.data_ptr() == address and second.eq(2).all()


def test_buffers_lie_in_the_first_gap_that_is_large_enough_and_never_on_another() -> None:
    memory = BufferMemory(6 * PAGE)
    one, two, three = (memory.allocate(size) for size in (PAGE - 1, 2 * PAGE, PAGE))
    assert one is not None and two is not None and three is not None
    begin = one.data_ptr()
    assert [buffer.data_ptr() - begin for buffer in (two, three)] == [PAGE, 3 * PAGE]
    del two
    wide, narrow = memory.allocate(2 * PAGE + 1), memory.allocate(PAGE)
    assert wide is None and narrow is not None and narrow.data_ptr() == begin + PAGE
    assert memory.allocate(0) is None
    last = memory.allocate(2 * PAGE)
    assert last is not None and last.data_ptr() == begin + 4 * PAGE


def test_what_is_freed_at_once_lies_at_the_end_and_leaves_no_gap_among_others() -> None:
    memory = BufferMemory(6 * PAGE)
    stays = memory.allocate(PAGE)
    brief = memory.allocate(PAGE + 1, is_brief=True)
    longer = memory.allocate(3 * PAGE)
    assert stays is not None and brief is not None and longer is not None
    begin = stays.data_ptr()
    assert [buffer.data_ptr() - begin for buffer in (brief, longer)] == [4 * PAGE, PAGE]
    del brief
    last = memory.allocate(2 * PAGE)
    assert last is not None and last.data_ptr() == begin + 4 * PAGE


def test_empty_tensors_lie_in_the_memory_while_it_has_a_place() -> None:
    memory = BufferMemory(3 * PAGE)
    here = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    with EmptyTensors(memory, 2):
        ours = torch.empty((PAGE // 2,), **here)
        torchs = torch.empty((PAGE // 2,), **here)  # the output of an all-gather would have no place next to it
    after = torch.empty((1,), **here)
    output = memory.allocate(2 * PAGE)
    assert output is not None and memory.allocate(1) is None
    assert (ours.shape, ours.dtype, torchs.shape, after.shape) == ((PAGE // 2,), torch.bfloat16, (PAGE // 2,), (1,))
    address = ours.data_ptr()
    del ours, torchs, after
    again = memory.allocate(PAGE)
    assert again is not None and again.data_ptr() == address


class Parameter:
    """What FSDP2's FSDPParam does with its gathered tensors, without a process group."""

    def __init__(self) -> None:
        from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

        self.all_gather_outputs: list[torch.Tensor] = []
        self._unsharded_inner_tensors: list[torch.Tensor] = []
        for name in _Unsharded.METHODS:
            vars(self)[name] = getattr(FSDPParam, name).__get__(self)

    def gather(self: Any, numels: list[int]) -> list[int]:
        """Return the addresses."""
        self.init_all_gather_outputs(numels, [torch.float32] * len(numels), 1, torch.device("cpu"))
        self.alloc_all_gather_outputs()
        return [tensor.data_ptr() for tensor in self.all_gather_outputs]


@pytest.mark.skipif(not may_lend(), reason="this torch cannot give a storage other memory")
def test_unsharded_parameters_come_and_go_in_the_memory_and_stay_when_it_ends() -> None:
    memory, parameter, numels = BufferMemory(1 << 20), Parameter(), [1 << 17, 8, 1 << 18]
    probe = memory.allocate(1)
    assert probe is not None
    begin = probe.data_ptr()
    del probe
    ours: Any = _Unsharded(parameter, memory)
    addresses = parameter.gather(numels)
    assert addresses[0] == begin  # and the last is too large for the rest, the second too small to count
    assert all(not begin <= address < begin + (1 << 20) for address in addresses[1:])
    saved = parameter.all_gather_outputs[0].view(2, -1)  # as autograd's
    vars(parameter)["free_unsharded_param"]()
    assert [tensor.untyped_storage().size() for tensor in parameter.all_gather_outputs] == [0, 0, 0]
    assert parameter.gather(numels)[0] == begin == saved.data_ptr()
    for number, tensor in enumerate(parameter.all_gather_outputs):
        tensor.fill_(number)
    ours.end()
    assert all(tensor.eq(number).all() for number, tensor in enumerate(parameter.all_gather_outputs))
    assert parameter.all_gather_outputs[0].data_ptr() != begin and saved.eq(0).all()
    assert (whole := memory.allocate(1 << 20)) is not None and whole.data_ptr() == begin

"""Code that goes past the guard of cold parameters, to their addresses: it finds each parameter's own bytes at every instant, and
what it writes is a change as any other."""

from __future__ import annotations

import ctypes
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import devices
import pytest
import torch
from torch import nn
from torch.optim import SGD

import swapper
from e2e.models import finish_step
from e2e.twins import Twins, fail_in_the_middle, send_away
from swapper import _C
from swapper.paging.residency import Residency

pytestmark = devices.without_device("it uses addresses in host memory, where a parameter of a device has none")
MakeTwins = Callable[..., Twins]
WIDTH = 256
UPDATES = ["step", "backward", "deferred"]


def step(model: Any, optimizer: Any) -> torch.Tensor:
    inputs = torch.randn(8, WIDTH).to(next(model.parameters()).dtype)
    return finish_step(model(inputs).square().mean(), optimizer)


def address_of(parameter: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.data_ptr()


def by_address(parameter: torch.Tensor) -> torch.Tensor:
    nbytes = parameter.numel() * parameter.element_size()
    content = bytearray(ctypes.string_at(address_of(parameter), nbytes))
    return torch.frombuffer(content, dtype=parameter.dtype).view(parameter.shape)


def by_its_storage(parameter: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.as_subclass(torch.Tensor).detach().clone()


def by_numpy(parameter: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return torch.from_numpy(parameter.detach().numpy().copy())


def by_dlpack(parameter: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        capsule = torch._C._to_dlpack(parameter.detach())
    return torch.utils.dlpack.from_dlpack(capsule).clone()


READS = [torch.tensor, by_address, by_its_storage, by_numpy, by_dlpack]


@pytest.fixture
def make(twins: MakeTwins) -> Iterator[Callable[..., Twins]]:
    """Makes twins whose transfers are late, each by another time: what waits for them has its frame promised for long."""
    made: list[tuple[Twins, _C.Engine]] = []

    def end(pair: Twins, engine: _C.Engine) -> None:
        pair.close()
        engine.close()

    def make_delayed(master: bool = False, **options: Any) -> Twins:
        model = same_model()
        pair = twins(model.bfloat16() if master else model, master=master, **options)
        engine = _C.Engine(backend="threads", chaos={"seed": 5, "delay": 0.7, "reorder": 0.5})
        made.append((pair, engine))
        pair.manager.current.run._resources.store.swap_files._engine = engine
        return pair

    yield make_delayed
    while made:  # pytest keeps this list until the test's very end
        end(*made.pop())


def assert_shown(pair: Twins, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    wrong = [
        name
        for (name, swapped), plain in zip(pair.swapped.named_parameters(), pair.plain.parameters(), strict=True)
        if not torch.equal(read(swapped), plain)
    ]
    assert not wrong, f"{len(wrong)} of 24: {wrong}"


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("room_bytes", [0, 1 << 20])
@pytest.mark.parametrize("update", ["step", "backward"])
def test_right_after_a_step_each_read_gives_what_plain_torch_has(make: MakeTwins, update: str, room_bytes: int) -> None:
    pair = make(update=update, room_bytes=room_bytes)
    for number in range(10):
        pair.train(step, steps=1)
        assert_shown(pair, READS[number % len(READS)])
    pair.finish(paged=False)


@pytest.mark.parametrize("placement", [{}, {"optimizer_state": "host"}, {"gradients": "nvme"}])
@pytest.mark.parametrize("master", [False, True])
def test_wherever_the_rest_lies(make: MakeTwins, placement: dict[str, str], master: bool) -> None:
    pair = make(master=master, **placement)
    for _ in range(4):
        pair.train(step, steps=1)
        assert_shown(pair, by_address)
    pair.finish(paged=False)


def test_a_deferred_step_is_seen_once_it_is_finished(make: MakeTwins) -> None:
    """Until then the addresses have what the step is still to change: who goes past the guard cannot be told."""
    pair = make(update="deferred")
    for _ in range(3):
        before = [parameter.detach().clone() for parameter in pair.plain.parameters()]
        pair.train(step, steps=1)
        for swapped, old in zip(pair.swapped.parameters(), before, strict=True):
            assert torch.equal(by_address(swapped), old)
        pair.swapped.state_dict()
        assert_shown(pair, by_address)
    pair.finish(paged=False)


@pytest.mark.parametrize("update", UPDATES)
def test_another_thread_that_reads_all_the_time_sees_only_what_a_parameter_was_or_is(
    make: MakeTwins, update: str
) -> None:
    pair = make(
        update=update, make_optimizer=lambda of: SGD(of, lr=1e-2, momentum=0.9)
    )  # changes each element at one blow
    inputs = [torch.randn(8, WIDTH) for _ in range(8)]
    history = {name: [p.detach().clone()] for name, p in pair.plain.named_parameters()}
    losses = []
    for value in inputs:
        losses.append(finish_step(pair.plain(value).square().mean(), pair.plain_optimizer))
        for name, parameter in pair.plain.named_parameters():
            history[name].append(parameter.detach().clone())
    known = {name: torch.stack(values) for name, values in history.items()}
    places = [(name, address_of(p), p.numel()) for name, p in pair.swapped.named_parameters()]
    wrong: list[str] = []
    is_over = threading.Event()
    reads = 0

    def look() -> None:
        nonlocal reads
        choices = random.Random(1)
        while not is_over.is_set() and not wrong:
            name, address, numel = choices.choice(places)
            begin = choices.randrange(numel - 64)
            seen = torch.frombuffer(bytearray(ctypes.string_at(address + 4 * begin, 256)), dtype=torch.float32)
            if not (known[name].view(len(inputs) + 1, -1)[:, begin : begin + 64] == seen).any(0).all():
                wrong.append(f"{name} at {begin}")
            reads += 1

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for value, loss in zip(inputs, losses, strict=True):
            actual = finish_step(pair.swapped(value).square().mean(), pair.optimizer)
            assert torch.equal(actual, loss)
    finally:
        is_over.set()
        thread.join()
    assert wrong == [] and reads > 0
    pair.finish(paged=False)


# --- writes -----------------------------------------------------------------------------------------------------------


def write(pair: Twins, number: int, at: int, value: float) -> None:
    """Change an element of a parameter of both, of the swapped one past its guard."""
    swapped, plain = list(pair.swapped.parameters())[number], list(pair.plain.parameters())[number]
    ctypes.cast(address_of(swapped), ctypes.POINTER(ctypes.c_float))[at] = value
    with torch.no_grad():
        plain.view(-1)[at] = value


@pytest.mark.parametrize("room_bytes", [0, 1 << 20])
@pytest.mark.parametrize("update", ["step", "backward"])
def test_what_is_written_between_steps_is_as_in_plain_torch(make: MakeTwins, update: str, room_bytes: int) -> None:
    """Whatever the pages of the parameters are doing: away, on their way, promised, or in their frames."""
    pair = make(update=update, room_bytes=room_bytes)
    choices = random.Random(2)
    for number in range(8):
        pair.train(step, steps=1)
        for which in choices.sample(range(24), 6):
            write(pair, which, choices.randrange(WIDTH), float(number))
        assert_shown(pair, by_address)
        if number == 4:
            send_away(pair.manager)
            assert_shown(pair, by_address)
    pair.finish(paged=False)


@pytest.mark.parametrize("kind", ["snapshot", "state_dict", "gather", "resume"])
def test_what_is_written_is_in_all_that_is_made_of_the_model(make: MakeTwins, tmp_path: Any, kind: str) -> None:
    pair = make()
    pair.train(step, steps=2)
    send_away(pair.manager)
    for number in (0, 9, 23):
        write(pair, number, 7, 3.5)
    expected = pair.plain.state_dict()
    if kind == "snapshot":
        pair.manager.snapshot(tmp_path / "s.pt").wait()
        found = torch.load(tmp_path / "s.pt")["model"]
    elif kind == "state_dict":
        found = {name: value.clone() for name, value in pair.swapped.state_dict().items()}
    elif kind == "gather":
        found = {}
        for name, parameter in pair.swapped.named_parameters():
            with pair.manager.gather(parameter):
                found[name] = parameter.detach().clone()
    else:
        pair.resume(same_model())
        found = {name: value.clone() for name, value in pair.swapped.state_dict().items()}
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    pair.close()


def same_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12)))


@pytest.mark.parametrize("early", ["snapshot", "resume"])
def test_what_is_written_after_the_last_steps_commit_is_committed_by_closing(
    make: MakeTwins, tmp_path: Path, early: str
) -> None:
    pair = make()
    pair.train(step, steps=2)
    if early == "snapshot":
        pair.manager.snapshot(tmp_path / "s.pt").wait()
    else:
        pair.resume(same_model())
    for number in (0, 9, 23):
        write(pair, number, 7, 3.5)
    pair.resume(same_model())
    assert pair.manager.step == 2
    assert_shown(pair, by_address)
    pair.close()


def test_a_step_that_fails_is_not_undone_without_what_was_written_before_it(make: MakeTwins) -> None:
    """The last commit, which the step's forward has captured, lacks that."""
    pair = make()
    pair.train(step, steps=2)
    pair.swapped(torch.randn(8, WIDTH)).square().mean().backward()
    write(pair, 9, 7, 3.5)
    fail_in_the_middle(pair)
    with pytest.raises(RuntimeError, match="a fault in the middle"):
        pair.optimizer.step()
    with pytest.raises(RuntimeError, match="memory and files hold a mix of two steps"):
        step(pair.swapped, pair.optimizer)


def test_what_is_written_after_a_deferred_step_is_refused_since_that_was_to_come_before(make: MakeTwins) -> None:
    pair = make(update="deferred")
    pair.train(step, steps=2)
    pair.swapped.state_dict()  # finishes the step
    write(pair, 4, 7, 3.5)
    pair.train(step, steps=1)
    write(pair, 4, 9, 3.5)
    with pytest.raises(swapper.StateError, match=r"2\.weight was changed after optimizer\.step\(\).*gather"):
        pair.swapped(torch.randn(8, WIDTH))
    pair.close()


def test_a_write_that_a_master_does_not_follow_is_told_by_the_forward_that_meets_it(make: MakeTwins) -> None:
    pair = make(master=True)
    pair.train(step, steps=2)
    send_away(pair.manager)
    swapped = list(pair.swapped.parameters())[10]
    ctypes.cast(address_of(swapped), ctypes.POINTER(ctypes.c_uint8))[1] ^= 1
    with pytest.raises(swapper.StateError, match=r"5\.weight was changed in a forward.*master"):
        pair.swapped(torch.randn(8, WIDTH).bfloat16())
    pair.close()


def test_it_is_said_once(make: MakeTwins, caplog: pytest.LogCaptureFixture) -> None:
    pair = make()
    pair.train(step, steps=1)
    for number in (3, 8):
        write(pair, number, 7, 3.5)
        pair.manager.current.run.pager.flush()
    told = [record.getMessage() for record in caplog.records if "past its guard" in record.getMessage()]
    assert len(told) == 1 and told[0].startswith("parameter 1.bias was changed") and "write=True" in told[0]
    pair.close()


class ChangedUnderWrite:
    """The engine of a run. At the next write to `place`, a file's offset, `change` comes while the drive is half-way through it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.place = -1
        self.change: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def write(self, file: Any, offset: int, address: int, nbytes: int, **options: Any) -> Any:
        ticket = self._engine.write(file, offset, address, nbytes, **options)
        if offset == self.place:
            self.place = -1
            ticket.wait()
            self.change()
            with Path(file.path).open("r+b") as changed:
                os.pwrite(changed.fileno(), ctypes.string_at(address, nbytes // 2), offset)
        return ticket


def test_a_page_that_is_changed_under_its_write_is_no_damage_of_the_drive(make: MakeTwins) -> None:
    pair = make()
    pair.train(step, steps=1)
    pager, store = pair.manager.current.run.pager, pair.manager.current.run._resources.store.swap_files
    store._engine = engine = ChangedUnderWrite(store._engine)
    page = next(page for page in pager._pages if "10.weight" in page.tensors)
    engine.place, engine.change = page.file_offset, lambda: write(pair, 20, 7, 3.5)
    pair.train(step, steps=1)
    assert engine.place == -1
    with pager._lock:
        while page.residency is Residency.WRITING:
            page.ticket.wait()
            pager._frames.settle()
    assert page.torn
    assert_shown(pair, by_address)
    pair.train(step, steps=2)
    assert not page.torn
    pair.finish(paged=False)

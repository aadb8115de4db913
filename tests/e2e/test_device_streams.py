"""A forward on several streams: what one of them writes is waited for by who uses it on another, and memory goes last.

torch has each backward node, and the hooks before and behind it, on the stream of its forward, and joins streams when all of the
backward is over. The CPU's autograd knows no streams: layers here tell the device of the tests which one is the current one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from infer.host_device import ORDERS, HostDevice
from torch import nn

import swapper
from e2e.device_twins import MIB, MakeTwins, assert_can_be_closed, forget_copies, lose, on_device
from e2e.twins import Twins, smallest_device_budget
from swapper.device.device_memory import DeviceStorage
from swapper.modules.home import DeviceHome
from swapper.train.groups.train_device import StreamOrder, TrainingDevice

__all__ = ["on_device"]

WIDTH = 192
BRANCHES = ("left", "right")
UPDATES = ("step", "deferred", "backward")
KEPT = {"update_on": "device", "gradients": "device"}


class Streams:
    """The user's streams on a device: "main" and others, by name."""

    def __init__(self, device: HostDevice, *names: str) -> None:
        self.device = device
        self.main = device.module.compute
        self._others = {name: device.new_compute_stream() for name in names}
        self.written: dict[int, Any] = {}  # by storage of a gradient: the moment of the kernel that wrote it

    def __getitem__(self, name: str) -> Any:
        return self._others.get(name, self.main)

    def __deepcopy__(self, memo: Any) -> Streams:
        return self

    def wait(self, name: str, *others: str) -> None:
        """What is queued on a stream from now on comes behind what is on the others."""
        for other in others:
            self.device.let_wait(self[name], self.device.record(self[other]))

    def switch(self, name: str) -> None:
        self.device.module.current = self[name]

    def note(self, parameter: torch.Tensor) -> None:
        """A hook: the gradient was written by a kernel on the current stream."""
        assert parameter.grad is not None
        self.written[parameter.grad.untyped_storage()._cdata] = self.device.module.current.tick()


class Looking(torch.optim.SGD):
    """Its kernels are on the current stream, which must come behind those that wrote the gradients."""

    streams: Streams | None = None

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        for parameter in (p for group in self.param_groups for p in group["params"] if self.streams is not None):
            moment = self.streams.written.get(parameter.grad.untyped_storage()._cdata)
            is_known = moment is None or self.streams.device.module.current.knows(moment)
            assert is_known, "an update that does not wait for its gradient"
        return super().step(closure)


class _Kernel(torch.autograd.Function):
    """A linear layer. The backward is on the stream that is the current one by then."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor, streams: Streams, name: str) -> torch.Tensor:
        ctx.streams = streams
        ctx.save_for_backward(value, weight)
        with streams.device.module.stream(streams[name]):
            streams.device.use(weight)
        return value @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,), (value, weight) = gradients, ctx.saved_tensors
        ctx.streams.device.use(weight)
        return gradient @ weight, gradient.t() @ value if ctx.needs_input_grad[1] else None, None, None


class Layer(nn.Module):
    """A linear layer on a stream.

    Args:
        stream: its name.
        before, after: streams that it waits for, in the forward and in the backward, as the user and autograd have it.
    """

    streams: Streams | None = None

    def __init__(self, stream: str, before: str, after: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 16)
        self.stream, self.before, self.after = stream, before.split(), after.split()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if self.streams is None:
            return value @ self.weight.t()
        return on_stream(self.streams, value, self.weight, self.stream, self.after)


def on_stream(
    streams: Streams, value: torch.Tensor, weight: torch.Tensor, stream: str, after: list[str]
) -> torch.Tensor:
    made = _Kernel.apply(value, weight, streams, stream)

    def begin(_: torch.Tensor) -> None:
        streams.wait(stream, *after)
        streams.switch(stream)

    made.register_hook(begin)
    return made


class Branches(nn.Module):
    """Layers side by side, behind a frozen layer on a stream that no parameter is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Layer("frozen", "main", " ".join(BRANCHES))
        self.first.weight.requires_grad_(False)
        self.layers = nn.ModuleList(Layer(name, "frozen", "main") for name in BRANCHES)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.call(self.first, value)
        results = [self.call(layer, value) for layer in self.layers]
        if self.first.streams is not None:
            self.first.streams.wait("main", *BRANCHES)
        return torch.stack(results).sum(0)

    @staticmethod
    def call(layer: Layer, value: torch.Tensor) -> torch.Tensor:
        """As a user does: the layer is called on its stream."""
        if (streams := layer.streams) is None:
            return layer(value)
        streams.wait(layer.stream, *layer.before)
        with streams.device.module.stream(streams[layer.stream]):
            return layer(value)


def step(model: nn.Module, optimizer: Any) -> torch.Tensor:
    streams = next((layer.streams for layer in model.modules() if isinstance(layer, Layer)), None)
    start = torch.randn(8, WIDTH).requires_grad_()
    if streams is not None:
        start.register_post_accumulate_grad_hook(lambda _: streams.switch("main"))
    loss = model(start * 1).square().mean()
    loss.backward()
    if streams is not None:
        streams.wait("main", *BRANCHES)  # as torch has it when a backward is over: those on which gradients came
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@contextlib.contextmanager
def twins_on_streams(
    make: MakeTwins, directory: Path, model: nn.Module, order: str = "late", room_bytes: int = MIB // 4, **options: Any
) -> Iterator[tuple[Twins, Streams]]:
    """The swapped one runs on streams, in as little of the device's memory as it can."""
    options = {**KEPT, "params": "nvme", **options}
    device = HostDevice(order)
    memory = smallest_device_budget(directory, model, Looking(model.parameters()), device=device, **options)
    pair = make(model, Looking, device=device, device_memory=memory + room_bytes, wait=True, **options)
    streams = Streams(device, "frozen", *BRANCHES)
    for layer in pair.swapped.modules():
        if isinstance(layer, Layer):
            layer.streams = streams
    for parameter in pair.swapped.parameters():
        if parameter.requires_grad and options["gradients"] == "device":
            parameter.register_post_accumulate_grad_hook(streams.note)
    pair.original.streams = streams
    pair.offload()
    try:
        yield pair, streams
    except BaseException:
        streams.switch("main")
        forget_copies(pair)
        raise
    assert device.module.current is streams.main


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("gradients", ["device", "host"])
def test_training_is_bit_equal(on_device: MakeTwins, tmp_path: Path, order: str, update: str, gradients: str) -> None:
    options = {"update": update, "gradients": gradients, "order": order}
    with twins_on_streams(on_device, tmp_path, Branches(), **options) as (pair, _):
        pair.train(step, steps=3)
        pair.assert_same_parameters()


@pytest.mark.parametrize(
    "owner, wait, found",
    [
        (StreamOrder, "follow", "does not wait for its gradient"),
        (StreamOrder, "note", "does not wait for its gradient"),
    ],
)
def test_each_wait_is_needed(
    on_device: MakeTwins, tmp_path: Path, monkeypatch: Any, owner: type, wait: str, found: str
) -> None:
    monkeypatch.setattr(owner, wait, lambda self: None)
    with (
        pytest.raises(AssertionError, match=found),
        twins_on_streams(on_device, tmp_path, Branches(), update="backward") as (pair, _),
    ):
        for image in pair.manager.current.run.placed.processor._images:
            image.stays = False  # an update in an image that stays waits for its users besides
        pair.train(step, steps=3)
        pair.assert_same_parameters()


@pytest.mark.whole
@pytest.mark.parametrize("then", [DeviceStorage.free, DeviceStorage.invalidate])
@pytest.mark.parametrize("waits", [True, False])
def test_memory_is_given_back_and_filled_anew_behind_the_kernels_of_every_stream(
    monkeypatch: Any, then: Callable[[DeviceStorage], None], waits: bool
) -> None:
    device, source = HostDevice("late"), torch.ones(512, dtype=torch.uint8)
    copies, streams = device.new_stream(), [device.new_compute_stream() for _ in range(2)]
    storage = DeviceStorage(device, 512)
    storage.free()
    storage.allocate()
    storage.fill([(0, source)], copies)
    storage.all_is_queued()
    for stream in streams:
        with device.module.stream(stream):
            storage.wait_on_current_stream()
            device.use(storage.memory)
    if not waits:
        monkeypatch.setattr(DeviceStorage, "_follow_users", lambda self: None)
    with contextlib.nullcontext() if waits else pytest.raises(AssertionError, match="may still use"):
        then(storage)
        if storage.is_allocated:
            storage.fill([(0, source)], copies)


@pytest.mark.parametrize("look_at", ["gradient", "forward", "nothing"])
def test_gradients_that_updates_still_read_are_waited_for_by_whoever_changes_them(
    on_device: MakeTwins, tmp_path: Path, look_at: str
) -> None:
    """Updates read them on a stream of their own, also after the step. A dropped one is kept until its slices have arrived."""
    with twins_on_streams(on_device, tmp_path, Branches(), update="backward") as (pair, streams):
        updated: list[Any] = []
        callers: list[Any] = []
        sweep = pair.manager.current.run.model._sweep
        update = sweep.update

        def note(of: Any) -> None:
            update(of)
            callers.append(streams.device.module.current)
            updated.append(sweep.on_device.updating.tick())

        sweep.update = note

        def look(model: nn.Module, optimizer: Any) -> None:
            start = torch.randn(8, WIDTH).requires_grad_()
            start.register_post_accumulate_grad_hook(lambda _: streams.switch("main"))
            model(start * 1).square().mean().backward()

        pair.both(look)
        assert streams["frozen"] in callers, "no update from a stream that torch does not join"
        pair.both(lambda model, optimizer: optimizer.step())
        if look_at == "gradient":
            pair.both(lambda model, _: next(p for p in model.parameters() if p.grad is not None).grad.zero_())
        elif look_at == "forward":
            pair.both(lambda model, _: model(torch.ones(8, WIDTH).requires_grad_()).detach())
        assert all(map(streams.main.knows, updated)) == (look_at != "nothing")
        kinds = [type(p.grad) is torch.Tensor for p in pair.swapped.parameters() if p.grad is not None]
        assert (all(kinds), any(kinds)) == {
            "gradient": (False, True),
            "forward": (True, True),
            "nothing": (False, False),
        }[look_at]
        pair.assert_same_parameters()


def test_what_a_backward_has_updated_is_put_back_where_the_device_is_lost_in_it(
    on_device: MakeTwins, tmp_path: Path
) -> None:
    with twins_on_streams(on_device, tmp_path, Branches(), update="backward") as (pair, streams):
        pair.train(step, steps=1)
        model = pair.manager.current.run.model
        update = model._sweep.update

        def then_lose(of: Any) -> None:
            update(of)
            lose(streams.device)
            streams.switch("right")  # the next one to wait has something to wait for

        model._sweep.update = then_lose
        with pytest.raises(swapper.DeviceError):
            model.model.module(torch.randn(8, WIDTH).requires_grad_() * 1).square().mean().backward()
        assert not model.updates.is_open
        streams.switch("main")
        assert_can_be_closed(pair, streams.device)


class Fork(Layer):
    """One weight, used on two streams in one call, whose results are the module's outputs."""

    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        if self.streams is None:
            return value @ self.weight.t(), value @ self.weight.t()
        for name in BRANCHES:
            self.streams.wait(name, "main")
        left, right = (on_stream(self.streams, value, self.weight, name, ["main"]) for name in BRANCHES)
        self.streams.wait("main", *BRANCHES)
        return left, right


class Aside(Layer):
    """A weight, used on a stream that the module itself goes to, for what no earlier layer needs the gradient of."""

    def __init__(self) -> None:
        super().__init__("left", "main", "main")
        self.prompt = nn.Parameter(torch.randn(8, WIDTH))

    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        if self.streams is None:
            return value, self.prompt @ self.weight.t()
        self.streams.wait("left", "main")
        made = on_stream(self.streams, self.prompt, self.weight, "left", ["main"])
        self.streams.wait("main", "left")
        return value * 1, made * 1


class Between(nn.Module):
    """A module between layers of the main stream: it goes and comes back between forward and backward."""

    def __init__(self, inner: Layer) -> None:
        super().__init__()
        self.before = Layer("main", "main", "left right" if isinstance(inner, Fork) else "main")
        self.inner = inner
        self.after = nn.ModuleList(Layer("main", "main", "main") for _ in range(3))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        one, other = self.inner(self.before(value))
        value = one + other
        for layer in self.after:
            value = layer(value)
        return value


MODULES: dict[str, Callable[[], Layer]] = {"fork": lambda: Fork("main", "main", "main"), "aside": Aside}


def train_between(make: MakeTwins, directory: Path, module: str) -> None:
    model = Between(MODULES[module]())
    with twins_on_streams(make, directory, model, gradients="host", update_on="cpu", room_bytes=0) as (pair, _):
        pair.train(step, steps=3)
        pair.assert_same_parameters()


@pytest.mark.parametrize("module", MODULES)
def test_a_module_that_uses_several_streams_itself_has_its_parameters_on_each(
    on_device: MakeTwins, tmp_path: Path, module: str
) -> None:
    train_between(on_device, tmp_path, module)


@pytest.mark.parametrize(
    "module, owner, wait",
    [("fork", DeviceHome, "wait_on_current_stream"), ("aside", TrainingDevice, "gradient_came")],
)
def test_each_wait_for_such_a_module_is_needed(
    on_device: MakeTwins, tmp_path: Path, monkeypatch: Any, module: str, owner: type, wait: str
) -> None:
    monkeypatch.setattr(owner, wait, lambda self, *_: None)
    with pytest.raises(AssertionError, match="a kernel"):
        train_between(on_device, tmp_path, module)

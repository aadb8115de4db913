"""A model that was built on the meta device gets its values at their places, and then is as any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from infer.host_device import HostDevice
from safetensors.torch import save_file
from torch import nn

import swapper
from e2e.twins import assert_same

WIDTH = 256


class Model(nn.Module):
    """Layers, buffers with and without parameters in the same module, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU()) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def fill(module: nn.Module) -> None:
    """Values that depend on nothing but the place: the order of modules does not matter."""
    for number, tensor in enumerate((*module._parameters.values(), *module._buffers.values())):
        if tensor is not None and tensor.is_floating_point():
            generator = torch.Generator().manual_seed(number + tensor.numel())
            tensor.copy_(torch.rand(tensor.shape, generator=generator).to(tensor.dtype) + 0.01)
        elif tensor is not None:
            tensor.zero_()


def plain(dtype: torch.dtype) -> nn.Module:
    model = Model().to(dtype)
    with torch.no_grad():
        for module in model.modules():
            fill(module)
    return model


def train(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    losses = []
    for number in range(4):
        torch.manual_seed(number)
        loss = model(torch.randint(64, (8,))).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.fixture
def checkpoints(tmp_path: Path) -> dict[str, Path]:
    """One model in each of the forms that people have."""
    model = plain(torch.float32)
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    torch.save(state, tmp_path / "model.pt")
    torch.save({"model": state}, tmp_path / "nested.pt")
    save_file({n: v.clone() for n, v in state.items() if n != "head.weight"}, tmp_path / "model.safetensors")
    return {path.name: path for path in tmp_path.iterdir()}


@pytest.mark.parametrize("gradients", ["host", "nvme"])
@pytest.mark.parametrize("source", ["function", "model.pt", "nested.pt", "model.safetensors"])
def test_a_model_from_meta_trains_as_the_one_that_was_whole(
    tmp_path: Path, checkpoints: dict[str, Path], source: str, gradients: str
) -> None:
    reference = plain(torch.float32)
    expected = train(reference, adamw(reference))
    with torch.device("meta"):
        model = Model()
    identities = [id(parameter) for parameter in model.parameters()]
    run = tmp_path / "run"
    run.mkdir()
    with swapper.SwapManager(run, host_memory="16MiB") as manager:
        model, optimizer = manager.offload(
            model, adamw(model), params="nvme", optimizer_state="nvme", gradients=gradients,
            init=fill if source == "function" else checkpoints[source],
        )  # fmt: skip
        assert [id(parameter) for parameter in model.parameters()] == identities
        assert model.head.weight is model.embed.weight
        assert_same(train(model, optimizer), expected)
        for name, parameter in reference.named_parameters():
            with manager.gather(model.get_parameter(name)) as mine:
                assert torch.equal(mine, parameter), name
        for name, buffer in reference.named_buffers():
            assert torch.equal(model.get_buffer(name), buffer), name


def make_on_meta() -> nn.Module:
    with torch.device("meta"):
        return Model()


def make_without_weights() -> nn.Module:
    with swapper.without_weights():
        return Model()


@pytest.mark.parametrize("source", ["model.pt", "nested.pt", "model.safetensors"])
@pytest.mark.parametrize("make", [make_on_meta, make_without_weights, Model])
def test_buffers_of_a_checkpoint_are_taken_however_the_model_was_built(
    tmp_path: Path, checkpoints: dict[str, Path], make: Callable[[], nn.Module], source: str
) -> None:
    """As parameters are: averages of batch norm go with its weights."""
    reference, model = plain(torch.float32), make()
    with swapper.SwapManager(tmp_path / "run", host_memory="16MiB") as manager:
        model, optimizer = manager.offload(model, adamw(model), params="nvme", init=checkpoints[source])
        assert_same(dict(model.named_buffers()), dict(reference.named_buffers()))
        reference.eval(), model.eval()
        assert_same(train(model, optimizer), train(reference, adamw(reference)))


def test_buffers_that_a_checkpoint_lacks_or_that_belong_to_a_model_with_values_stay(
    tmp_path: Path, checkpoints: dict[str, Path]
) -> None:
    """And those that no state dict has."""
    model = make_without_weights()
    model.register_buffer("lacking", torch.ones(3))
    model.layers[0][1].register_buffer("running_mean", torch.ones(WIDTH), persistent=False)
    with swapper.SwapManager(tmp_path / "one", host_memory="16MiB") as manager:
        model, _ = manager.offload(model, adamw(model), params="nvme", init=checkpoints["model.pt"])
        assert torch.equal(model.lacking, torch.ones(3))
        assert torch.equal(model.layers[0][1].running_mean, torch.ones(WIDTH))
        assert model.layers[1][1].running_mean.ne(0).all()
    model = make_without_weights()
    model.layers[0] = plain(torch.float32).layers[0]
    with swapper.SwapManager(tmp_path / "two", host_memory="16MiB") as manager:
        model, _ = manager.offload(model, adamw(model), params="nvme", init=checkpoints["model.pt"])
        assert model.layers[1][1].running_mean.eq(0).all()


@pytest.mark.parametrize("source", ["function", "model.pt"])
def test_masters_follow_and_values_are_converted(tmp_path: Path, checkpoints: dict[str, Path], source: str) -> None:
    """An fp32 checkpoint into a bf16 model; the masters are what the parameters were rounded to."""
    reference = plain(torch.float32).bfloat16() if source != "function" else plain(torch.bfloat16)
    with torch.device("meta"):
        model = Model().bfloat16()
    run = tmp_path / "run"
    run.mkdir()
    with swapper.SwapManager(run, host_memory="16MiB") as manager:
        model, _ = manager.offload(
            model, adamw(model), params="nvme", optimizer_state="nvme", gradients="nvme",
            master_weights=torch.float32, init=fill if source == "function" else checkpoints[source],
        )  # fmt: skip
        manager.snapshot(tmp_path / "snapshot.pt").wait()
    saved = torch.load(tmp_path / "snapshot.pt", mmap=True)
    for name, parameter in reference.named_parameters():
        assert torch.equal(saved["model"][name], parameter), name
        assert torch.equal(saved["master"][name], parameter.float()), name


def test_what_parameters_on_meta_have_stays(tmp_path: Path) -> None:
    """Their attributes, hooks, and weak references, which recurrent layers keep."""

    def triple(parameter: torch.Tensor) -> None:
        parameter.grad *= 3

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LSTM(8, 8))
        first = model[0]
        first.weight.tag = "ours"
        first.weight.register_hook(lambda gradient: gradient * 2)
        first.bias.register_post_accumulate_grad_hook(triple)
        return model

    reference = make()
    with torch.device("meta"):
        model = make()
    torch.save(reference.state_dict(), tmp_path / "model.pt")
    with swapper.SwapManager(tmp_path / "run", host_memory="16MiB") as manager:
        manager.offload(model, adamw(model), params="nvme", init=tmp_path / "model.pt")
        value = torch.randn(3, 2, 8)
        for each in (reference, model):
            each(value)[0].square().sum().backward()
        for name, parameter in reference.named_parameters():
            assert torch.equal(model.get_parameter(name).grad, parameter.grad), name
        assert model[0].weight.tag == "ours"


@pytest.mark.parametrize("has_device", [False, True])
def test_parameters_from_meta_are_changed_apart(tmp_path: Path, checkpoints: dict[str, Path], has_device: bool) -> None:
    """Autograd does not take a change of one for a change of another."""
    model = make_on_meta()
    options: dict[str, Any] = {"device": HostDevice("late"), "device_memory": "64MiB"} if has_device else {}
    with swapper.SwapManager(tmp_path / "run", host_memory="64MiB") as manager:
        model, _ = manager.offload(model, adamw(model), params="nvme", init=checkpoints["model.pt"], **options)
        before = {name: parameter._version for name, parameter in model.named_parameters()}
        with torch.no_grad():
            model.layers[0][0].weight.mul_(2)
        changed = {name for name, parameter in model.named_parameters() if parameter._version != before[name]}
        assert changed == {"layers.0.0.weight"}


def test_a_meta_model_without_values_is_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Model()
    with (
        swapper.SwapManager(tmp_path, host_memory="16MiB") as manager,
        pytest.raises(swapper.UnsupportedError, match=r"embed\.weight is on the meta device.*init="),
    ):
        manager.offload(model, adamw(model))


@pytest.mark.parametrize("trained", ["all", "head"])
def test_state_without_values_is_refused(tmp_path: Path, trained: str) -> None:
    with torch.device("meta"):
        model = Model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained == "all" or name.startswith("embed"))
    optimizer = torch.optim.Adagrad(model.parameters())  # whose constructor makes state
    with swapper.SwapManager(tmp_path, host_memory="16MiB") as manager:
        with pytest.raises(swapper.UnsupportedError, match=r"'sum' of \S+ on the meta device.*model that has values"):
            manager.offload(model, optimizer, params="nvme", init=fill)
    assert not list(tmp_path.rglob("*.swap"))


@pytest.mark.whole
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("layers.2.0.weight"), r"lacks 1 of the model's tensors: layers\.2\.0\.weight"),
        (lambda state: state.update({"layers.0.0.bias": torch.zeros(3)}), r"layers\.0\.0\.bias of shape \[3\]"),
    ],
    ids=["missing", "shape"],
)
def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, change: Any, message: str
) -> None:
    state = dict(plain(torch.float32).state_dict())
    change(state)
    torch.save(state, tmp_path / "model.pt")
    run = tmp_path / "run"
    run.mkdir()
    with torch.device("meta"):
        model = Model()
    with swapper.SwapManager(run, host_memory="16MiB") as manager:
        with pytest.raises(swapper.UnsupportedError, match=message):
            manager.offload(model, adamw(model), init=tmp_path / "model.pt")
        assert list(run.rglob("*.swap")) == []
    assert all(parameter.is_meta for parameter in model.parameters())


class Turned(Model):
    """With a buffer that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.arange(4.0), persistent=False)


def test_buffers_that_no_checkpoint_has_are_made_as_ever_without_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = Turned()
    torch.save(whole.state_dict(), tmp_path / "model.pt")
    with torch.device("meta"):
        absent = Turned()
    with swapper.without_weights():
        model = Turned()
    with swapper.SwapManager(tmp_path, host_memory="16MiB") as manager:
        with pytest.raises(swapper.UnsupportedError, match=r"frequencies\. .* swapper\.without_weights"):
            manager.offload(absent, adamw(absent), init=tmp_path / "model.pt")
        model, _ = manager.offload(model, adamw(model), init=tmp_path / "model.pt")
        assert_same(dict(model.state_dict()), dict(whole.state_dict()))
        assert torch.equal(model.frequencies, whole.frequencies)

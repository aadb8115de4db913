"""The transforms of torch.func over a model in training: they give what plain torch gives, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import devices
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, functionalize, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import swapper
from e2e.twins import Twins, send_away

WIDTH = 48


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def rows(seed: int = 3) -> torch.Tensor:
    values = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed), device="cpu")
    return values.to(torch.get_default_device())


def step(model: Any, optimizer: Any) -> torch.Tensor:
    loss = model(rows()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


Parameters = dict[str, torch.Tensor]
Of = Callable[[nn.Module, Parameters], Any]


def output_and_pulled(model: nn.Module) -> Any:
    output, pull = vjp(model, rows())
    return output, pull(torch.ones_like(output))


def output_and_pushed(model: nn.Module) -> Any:
    output, push = linearize(model, rows())
    return output, push(rows(4))


def with_duals(model: nn.Module) -> Any:
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(model(forward_ad.make_dual(rows(), rows(4)))))


def batched_backward(model: nn.Module) -> Any:
    x = rows().requires_grad_()
    return torch.autograd.grad(model(x).sum(1), [x, *model.parameters()], torch.eye(3), is_grads_batched=True)


OVER_INPUTS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda m: grad(lambda x: m(x).sum())(rows()),
    "vjp": output_and_pulled,
    "jvp": lambda m: jvp(m, (rows(),), (rows(4),)),
    "vmap": lambda m: vmap(m)(rows()),
    "jacrev": lambda m: jacrev(m)(rows()[0]),
    "jacfwd": lambda m: jacfwd(m)(rows()[0]),
    "hessian": lambda m: hessian(lambda x: m(x).sum())(rows()[0]),
    "linearize": output_and_pushed,
    "functionalize": lambda m: functionalize(m)(rows()),
    "vmap-of-grad": lambda m: vmap(grad(lambda x: m(x).sum()))(rows()),
    "dual": with_duals,
    "batched": batched_backward,
    "a-weight-in-vmap": lambda m: vmap(lambda x: m.layers[0].weight @ x)(rows()),
    "a-weight-in-grad": lambda m: grad(lambda x: (m.layers[0].weight @ x).sum())(rows()[0]),
    "of-a-weight": lambda m: grad(lambda w: w.square().sum())(m.layers[0].weight),
    "vmap-over-a-weight": lambda m: vmap(lambda w: w.sum())(m.layers[0].weight),
}


def loss_with(model: nn.Module, parameters: Parameters, x: torch.Tensor) -> torch.Tensor:
    return functional_call(model, parameters, (x,)).square().mean()


def ones(parameters: Parameters) -> Parameters:
    return {name: torch.ones(p.shape) for name, p in parameters.items()}


OVER_PARAMETERS: dict[str, Of] = {
    "grad": lambda m, ps: grad(lambda own: loss_with(m, own, rows()))(ps),
    "vjp": lambda m, ps: vjp(lambda own: loss_with(m, own, rows()), ps)[1](torch.ones(())),
    "jvp": lambda m, ps: jvp(lambda own: loss_with(m, own, rows()), (ps,), (ones(ps),)),
    "each-sample": lambda m, ps: vmap(grad(lambda own, x: loss_with(m, own, x)), in_dims=(None, 0))(ps, rows()),
    "jacrev": lambda m, ps: jacrev(lambda own: functional_call(m, own, (rows(),)).sum(1))(ps),
    "of-hessian": lambda m, ps: jvp(grad(lambda own: loss_with(m, own, rows())), (ps,), (ones(ps),)),
}

GIVEN: dict[str, Callable[[nn.Module], Parameters]] = {
    "own": lambda model: dict(model.named_parameters()),
    "state_dict": lambda model: dict(model.state_dict()),
    "copies": lambda model: {name: p.detach().clone() for name, p in model.named_parameters()},
}


def transform_between_steps(directory: Path, run: Callable[[nn.Module], Any], **options: Any) -> None:
    torch.manual_seed(0)
    pair = Twins(directory, Deep(), **options)
    pair.train(step, steps=1)
    send_away(pair.manager)

    def between(model: nn.Module, _: Any) -> Any:
        is_on_device = devices.NAME and model is pair.swapped
        with (
            pair.manager.gather(model) if is_on_device else nullcontext()
        ):  # it is refused without, as graphs over graphs are
            return run(model)

    pair.both(between)
    pair.check_pager()
    pair.train(step, steps=2)
    pair.finish(paged=False)


@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
@pytest.mark.parametrize("name", OVER_INPUTS)
def test_over_inputs(tmp_path: Path, name: str, update: str) -> None:
    if update == "deferred" and name in ("of-a-weight", "vmap-over-a-weight"):
        pytest.skip(
            "torch wraps such a weight in C++, past the guard: it has the values of before the step (docs/reference/loops.md)"
        )
    transform_between_steps(tmp_path, OVER_INPUTS[name], update=update)


@pytest.mark.parametrize("update", ["step", "deferred"])
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("name", OVER_PARAMETERS)
def test_over_parameters(tmp_path: Path, name: str, given: str, update: str) -> None:
    if given == "state_dict":
        devices.skip_on_device("a state_dict of parameters on a device is in host memory")
    transform_between_steps(tmp_path, lambda model: OVER_PARAMETERS[name](model, GIVEN[given](model)), update=update)


def test_a_failure_inside_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(model: nn.Module) -> None:
        with pytest.raises(ZeroDivisionError):
            grad(lambda x: model(x).sum() / (1 // 0))(rows())

    transform_between_steps(tmp_path, fail)


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(x))


SCRIPTED: dict[str, Callable[[], Any]] = {
    "script": lambda: torch.jit.script(nn.Linear(WIDTH, WIDTH)),
    "trace": lambda: torch.jit.trace(nn.Linear(WIDTH, WIDTH), rows()),
    "a-scripted-child": lambda: Around(torch.jit.script(nn.Linear(WIDTH, WIDTH))),
    "a-traced-child": lambda: Around(torch.jit.trace(nn.Linear(WIDTH, WIDTH), rows())),
}


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("verb", ["offload", "load"])
@pytest.mark.parametrize("make", SCRIPTED.values(), ids=SCRIPTED)
def test_torchscript_is_refused_by_name(tmp_path: Path, make: Callable[[], Any], verb: str) -> None:
    model = make()
    expected, file = model(rows()), tmp_path / "weights.pt"
    torch.save(model.state_dict(), file)
    with pytest.raises(swapper.UnsupportedError, match=r"(the model|module inner) is TorchScript.*before torch\.jit"):
        if verb == "load":
            swapper.load(model, file)
        else:
            with swapper.SwapManager(tmp_path, host_memory="64MiB") as manager:
                manager.offload(model, torch.optim.SGD(model.parameters()))
    assert torch.equal(model(rows()), expected)

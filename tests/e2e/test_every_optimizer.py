"""Every optimizer of torch, and some of other people's, against plain torch: twenty steps, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)

import swapper
from e2e import third_party
from e2e.twins import Twins

MakeTwins = Callable[..., Twins]

Muon = getattr(
    torch.optim, "Muon", None
)  # torch 2.9; with few of its products in bf16, which some processors make slowly

OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], str]] = {
    # Its maker, and how it can work: s(ingle), f(oreach), F(used).
    "Adam": (partial(Adam, lr=1e-2), "sfF"),
    "Adam, amsgrad, decay": (partial(Adam, amsgrad=True, weight_decay=0.1, maximize=True), "sfF"),
    "AdamW": (partial(AdamW, lr=1e-2), "sfF"),
    "SGD": (partial(SGD, lr=0.1, weight_decay=0.01), "sfF"),
    "SGD, momentum": (partial(SGD, lr=0.1, momentum=0.9, dampening=0.3), "sfF"),
    "SGD, nesterov": (partial(SGD, lr=0.1, momentum=0.9, nesterov=True), "sfF"),
    "RMSprop": (partial(RMSprop, lr=1e-3), "sf"),
    "RMSprop, centered, momentum": (partial(RMSprop, lr=1e-3, centered=True, momentum=0.9), "sf"),
    "Adagrad": (partial(Adagrad, lr=1e-2, initial_accumulator_value=0.125, lr_decay=0.01), "sfF"),
    "Adadelta": (partial(Adadelta, lr=1.0), "sf"),
    "Adamax": (partial(Adamax, lr=1e-2), "sf"),
    "NAdam": (partial(NAdam, lr=1e-2), "sf"),
    "RAdam": (partial(RAdam, lr=1e-2), "sf"),
    "ASGD": (partial(ASGD, lr=1e-2, t0=5), "sf"),
    "Rprop": (partial(Rprop, lr=1e-2), "sf"),
    "Adafactor": (partial(Adafactor, lr=1e-2), "sf"),
    "Lion": (third_party.Lion, ""),
    "a rebinding one": (third_party.Rebinding, ""),
    "a factored one": (third_party.FactoredRms, ""),
    "one with lists": (third_party.Whitening, ""),
    "a subclass of AdamW": (third_party.Scaled, ""),
} | ({"Muon": (partial(Muon, lr=1e-2, ns_steps=1), "")} if Muon else {})

WAYS = {"s": {"foreach": False}, "f": {"foreach": True}, "F": {"fused": True}}
KINDS = ("fp32", "bf16", "masters")


def combinations() -> list[Any]:
    found = []
    for name, (make, ways) in OPTIMIZERS.items():
        for way in ways or "-":
            for kind in KINDS:
                if "SGD, " in name and way == "F" and kind == "bf16":
                    continue  # refused: wrong in torch itself
                found.append(pytest.param(name, partial(make, **WAYS.get(way, {})), kind, id=f"{name}-{way}-{kind}"))
    return found


class Shapes(nn.Module):
    """Parameters of all sorts of shapes. There is no forward: tests give them gradients."""

    def __init__(self, dtype: torch.dtype, only_matrices: bool) -> None:
        super().__init__()
        shapes = [(512, 448), (2000,), (64, 32, 3, 3), (513, 257), (), (1,), (37, 5, 7), *[(448, 512)] * 3]
        if only_matrices:  # Muon, whose products have the square of the shorter side in them
            shapes = [(2048, 64), (513, 57), *[(64, 2048)] * 3]
        self.layers = nn.ModuleList()
        for shape in shapes:
            layer = nn.Module()  # a group of its own
            layer.weight = nn.Parameter((torch.randn(shape) * 0.1).to(dtype))
            self.layers.append(layer)


NOISE = torch.randn(1 << 19, generator=torch.Generator().manual_seed(1))
NOISE *= 10.0 ** torch.randint(-4, 1, NOISE.shape, generator=torch.Generator().manual_seed(2))


def random_gradients(model: Any, optimizer: Any) -> None:
    """Each is another piece of the noise, which takes longer to make than a step does."""
    for number, parameter in enumerate(model.parameters()):
        begin = int(torch.randint(0, NOISE.numel() - parameter.numel(), ()))
        gradient = (
            NOISE[begin : begin + parameter.numel()]
            .view(parameter.shape)
            .to(parameter.device, parameter.dtype, copy=True)
        )
        absent = int(torch.randint(0, 4, ())) == 0 and number % 2 == 1  # now and then one has none
        parameter.grad = None if absent else gradient
    optimizer.step()


@pytest.mark.parametrize(("name", "make", "kind"), combinations())
def test_twenty_steps_are_bit_equal(twins: MakeTwins, name: str, make: Callable[..., Optimizer], kind: str) -> None:
    model = Shapes(torch.float32 if kind == "fp32" else torch.bfloat16, only_matrices=name == "Muon")
    pair = twins(model, make, master=kind == "masters")
    if "SGD, " in name:
        pair.train(all_gradients, steps=1)  # see the next test
    pair.train(random_gradients, steps=10)
    pair.assert_same_state()
    pair.train(random_gradients, steps=9)
    pool = pair.manager.current.run.plan.budget
    pair.finish(paged=False)
    counters = pair.manager.counters  # slices on their way to a device take a pool that may hold all state
    assert counters.bytes_read > 0 or pool.frame_count * pool.page_bytes >= counters.state_bytes


def all_gradients(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
    optimizer.step()


def test_a_first_gradient_that_comes_later_is_refused_where_torch_rounds_differently_then(twins: MakeTwins) -> None:
    model = Shapes(torch.bfloat16, only_matrices=False)
    pair = twins(model, partial(SGD, lr=0.1, momentum=0.9, foreach=True))

    def some_gradients(model: Any, optimizer: Any) -> None:
        for parameter in list(model.parameters())[2:]:
            parameter.grad = torch.ones(parameter.shape, dtype=parameter.dtype)
        optimizer.step()

    pair.train(some_gradients, steps=2)
    with pytest.raises(swapper.StateError, match=r"layers\.0\.weight has its first gradient.*foreach=False"):
        all_gradients(pair.swapped, pair.optimizer)
    pair.optimizer.zero_grad()
    pair.train(some_gradients, steps=1)
    pair.close()


@pytest.mark.parametrize("name", ["SGD, momentum", "NAdam", "Adagrad", "Adafactor", "a rebinding one"])
def test_state_is_taken_over_saved_and_loaded_as_in_plain_torch(twins: MakeTwins, name: str) -> None:
    """Steps before offload; a plain state_dict in between; and back into plain torch."""
    make, _ = OPTIMIZERS[name]
    model = Shapes(torch.float32, only_matrices=False)
    before = make(model.parameters())
    for _ in range(3):
        random_gradients(model, before)
    pair = twins(model, make, wait=True)
    pair.plain_optimizer.load_state_dict(before.state_dict())
    pair.original.load_state_dict(before.state_dict())
    pair.offload()
    pair.train(random_gradients, steps=2)
    pair.plain_optimizer.load_state_dict(pair.optimizer.state_dict())
    pair.optimizer.load_state_dict(pair.plain_optimizer.state_dict())
    pair.train(random_gradients, steps=3)
    pair.finish(paged=False)


def test_what_an_optimizer_counts_outside_of_its_state_advances_once_a_step(twins: MakeTwins) -> None:
    pair = twins(Shapes(torch.float32, only_matrices=False), third_party.Rebinding)
    pair.train(random_gradients, steps=3)
    assert pair.original.calls == pair.plain_optimizer.calls == 3
    assert pair.optimizer.param_groups[0]["seen"] == 3
    pair.close()


@pytest.mark.whole
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (LBFGS, "history of flat vectors over all parameters"),
        (SparseAdam, r"sparse gradients.*sparse=False"),
        (third_party.Coupled, "depends on the others"),
        (third_party.Noisy, "or on chance"),
        (third_party.Wrapper, "'inner' is an optimizer of its own"),
        (third_party.Remembering, "'flat' holds parameters"),
        (
            third_party.LowBit,
            r"for a parameter of \[128, 96\] it keeps 'momentum' as torch.int8.*in another form for a smaller",
        ),
        (third_party.LowBitTensors, "it keeps 'momentum' as a Quantized"),
        (third_party.ListOfLists, "it keeps 'factors' as a list"),
        (third_party.GlobalState, "as in swapper's sweep, failed with KeyError"),
        (third_party.NeedsClosure, "failed with TypeError.*closure"),
        (partial(AdamW, capturable=True), "build it with capturable=False"),
        (partial(AdamW, differentiable=True), "build it with differentiable=False"),
    ],
)
def test_what_cannot_be_exact_is_refused_with_the_reason(
    twins: MakeTwins, make: Callable[..., Optimizer], reason: str
) -> None:
    pair = twins(Shapes(torch.float32, only_matrices=False), make, wait=True, budget=32 << 20)
    with pytest.raises(swapper.UnsupportedError, match=reason):
        pair.offload()


def test_torchs_wrong_kernel_is_refused(twins: MakeTwins) -> None:
    pair = twins(Shapes(torch.bfloat16, False), partial(SGD, momentum=0.9, fused=True), wait=True, budget=32 << 20)
    with pytest.raises(swapper.UnsupportedError, match=r"wrong values for torch\.bfloat16.*leave out fused=True"):
        pair.offload()


def test_a_budget_for_whole_parameters_is_named_where_they_cannot_be_cut(twins: MakeTwins) -> None:
    """Adafactor needs a whole matrix at one time, AdamW a page of it."""
    budgets = {}
    for make in (partial(Adafactor, lr=1e-2), partial(SGD, lr=0.1, momentum=0.9)):
        pair = twins(nn.Linear(1024, 4096), make)
        budgets[make.func] = pair.manager._options.host_bytes
        pair.close()
    weight_bytes = 1024 * 4096 * 4
    assert budgets[Adafactor] >= 3 * weight_bytes > budgets[SGD]  # its gradient, and two slices at one time


def test_settings_changed_so_that_other_state_would_be_kept_are_refused(twins: MakeTwins) -> None:
    pair = twins(Shapes(torch.float32, only_matrices=False), partial(SGD, lr=0.1))
    pair.train(random_gradients, steps=2)
    pair.optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(swapper.StateError, match=r"momentum_buffer.*before manager\.offload"):
        random_gradients(pair.swapped, pair.optimizer)
    pair.optimizer.param_groups[0]["momentum"] = 0
    pair.train(random_gradients, steps=2)
    pair.finish(paged=False)

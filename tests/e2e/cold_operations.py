"""Whatever a user may do to a cold parameter. cold_process.py does it.

Each operation is promised to be refused, by an error that names `manager.gather`, or to work, in
which case it asserts by itself that its result is plain torch's.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn import functional as F

import swapper
from e2e.models import loss_of, tokens, train_step
from e2e.twins import Twins

Operation = Callable[[Twins], Any]
REFUSED: dict[str, Operation] = {}
WORKS: dict[str, Operation] = {}


def cold(pair: Twins) -> nn.Parameter:
    return pair.swapped.head.weight


def touch(name: str, operation: Callable[[nn.Parameter], Any]) -> None:
    """Add an operation on one cold parameter that needs its data."""
    REFUSED[name] = lambda pair: operation(cold(pair))


def works(name: str) -> Callable[[Operation], Operation]:
    def add(operation: Operation) -> Operation:
        WORKS[name] = operation
        return operation

    return add


# --- needs the data: refused ------------------------------------------------------------------------------------------

touch("sum", lambda p: p.sum())
touch("torch.sum", lambda p: torch.sum(p))
touch("add", lambda p: p + 1)
touch("add in place", lambda p: p.data.add_(1))
touch("radd", lambda p: 1 + p)
touch("compare", lambda p: p == 0)
touch("neg", lambda p: -p)
touch("matmul", lambda p: torch.ones(3, 512) @ p)
touch("einsum", lambda p: torch.einsum("ij,kj->ik", p, p))
touch("linear", lambda p: F.linear(torch.ones(2, 128), p))
touch("cat", lambda p: torch.cat([torch.ones(1, 128), p]))
touch("stack", lambda p: torch.stack([p, p]))
touch("out argument", lambda p: torch.add(torch.ones(512, 128), 1, out=p))
touch("where", lambda p: torch.where(torch.ones(512, 128) > 0, p, 0.0))
touch("foreach", lambda p: torch._foreach_norm([p]))
touch("equal", lambda p: torch.equal(p, torch.ones(512, 128)))
touch("allclose", lambda p: torch.allclose(torch.ones(512, 128), p))
touch("isnan", lambda p: p.isnan().any())
touch("norm", lambda p: torch.linalg.vector_norm(p))
touch("data", lambda p: p.data)
touch("set data", lambda p: setattr(p, "data", torch.zeros(3)))
touch("clone", lambda p: p.clone())
touch("view", lambda p: p.view(-1))
touch("transpose", lambda p: p.t())
touch("T", lambda p: p.T)
touch("index", lambda p: p[0])
touch("index by tensor", lambda p: p[torch.tensor([1, 2])])
touch("set index", lambda p: p.__setitem__(0, 1.0))
touch("index another by it", lambda p: torch.ones(3)[p])
touch("iterate", lambda p: list(p))
touch("unbind", lambda p: p.unbind())
touch("tolist", lambda p: p.tolist())
touch("item", lambda p: p.item())
touch("float", lambda p: float(p))
touch("bool", lambda p: bool(p))
touch("contains", lambda p: 1.0 in p)
touch("format", lambda p: f"{p:.3f}")
touch("numpy", lambda p: p.numpy())
touch("numpy by force", lambda p: p.numpy(force=True))
touch("numpy.asarray", lambda p: numpy.asarray(p))
touch("numpy ufunc", lambda p: numpy.sin(p))
touch("dlpack", lambda p: p.__dlpack__())
touch("torch.from_dlpack", lambda p: torch.from_dlpack(p))
touch("numpy.from_dlpack", lambda p: numpy.from_dlpack(p))
touch("data_ptr", lambda p: p.data_ptr())
touch("untyped_storage", lambda p: p.untyped_storage())
touch("storage", lambda p: p.storage())
touch("share_memory_", lambda p: p.share_memory_())
touch("to dtype", lambda p: p.to(torch.float16))
touch("half", lambda p: p.half())
touch("cpu", lambda p: p.to("cpu", copy=True))
touch("torch.save", lambda p: torch.save(p, io.BytesIO()))
touch("pickle", lambda p: pickle.dumps(p))
touch("copy.copy", lambda p: copy.copy(p))
touch("copy.deepcopy", lambda p: copy.deepcopy(p))
touch("init", lambda p: nn.init.normal_(p))
touch("init orthogonal", lambda p: nn.init.orthogonal_(p))
touch("resize_", lambda p: p.data.resize_(3))
touch("bernoulli_", lambda p: p.bernoulli_())
touch("backward through it", lambda p: (p * 2).sum().backward())
touch("parameters_to_vector", lambda p: nn.utils.parameters_to_vector([p]))
touch("vector_to_parameters", lambda p: nn.utils.vector_to_parameters(torch.zeros(p.numel()), [p]))


@torch.no_grad()
def change_in_place(pair: Twins) -> None:
    cold(pair).mul_(0.5)


@torch.no_grad()
def copy_into(pair: Twins) -> None:
    cold(pair).copy_(torch.zeros(512, 128))


def regularize(pair: Twins) -> None:
    sum(p.square().sum() for p in pair.swapped.parameters())


REFUSED |= {
    "change in place": change_in_place,
    "copy into it": copy_into,
    "regularization over all": regularize,
    "torch.save of the model": lambda pair: torch.save(pair.swapped, io.BytesIO()),
    "deepcopy of the model": lambda pair: copy.deepcopy(pair.swapped),
    "deepcopy of a part": lambda pair: copy.deepcopy(pair.swapped.blocks[0]),
    "model.half": lambda pair: pair.swapped.half(),
    "model.to(float16)": lambda pair: pair.swapped.to(torch.float16),
    "model.to(bfloat16) of a part": lambda pair: pair.swapped.blocks[0].to(torch.bfloat16),
    "model.double": lambda pair: pair.swapped.double(),
    "model.to(meta)": lambda pair: pair.swapped.to("meta"),
    "model.to_empty": lambda pair: pair.swapped.to_empty(device="cpu"),
    "model.share_memory": lambda pair: pair.swapped.share_memory(),
    "model.apply(init)": lambda pair: pair.swapped.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else m),
    "child called by function": lambda pair: F.linear(torch.ones(1, 128), pair.swapped.blocks[0].up.weight),
    "weight decay by hand": lambda pair: [p.data.mul_(0.99) for p in pair.swapped.parameters()],
    "moving average": lambda pair: torch.zeros(512, 128).lerp_(cold(pair), 0.1),
}  # fmt: skip


# --- needs no data, or can be done exactly: works ---------------------------------------------------------------------


@works("metadata")
def metadata(pair: Twins) -> None:
    p, q = cold(pair), pair.plain.head.weight
    for read in (
        lambda t: t.shape, lambda t: t.size(0), lambda t: t.dtype, lambda t: t.device, lambda t: t.ndim, lambda t: t.dim(),
        lambda t: t.numel(), lambda t: t.nelement(), lambda t: t.nbytes, lambda t: t.itemsize, lambda t: t.element_size(),
        lambda t: t.stride(), lambda t: t.is_contiguous(), lambda t: t.layout, lambda t: t.requires_grad, lambda t: t.is_leaf,
        lambda t: t.grad_fn, lambda t: t.is_cuda, lambda t: t.is_sparse, lambda t: t.is_floating_point(), lambda t: len(t),
        lambda t: t.is_complex(), lambda t: t.grad, lambda t: t.get_device(),
        lambda t: torch.is_tensor(t), lambda t: isinstance(t, nn.Parameter), lambda t: torch.numel(t), lambda t: t.is_meta,
        lambda t: torch.is_floating_point(t), lambda t: t.is_quantized, lambda t: t.is_inference(), lambda t: t.is_nested,
        lambda t: nn.parameter.is_lazy(t), lambda t: t.is_signed(), lambda t: t.retains_grad,
    ):  # fmt: skip
        assert read(p) == read(q)


@works("print")
def show(pair: Twins) -> None:
    assert "away" in repr(cold(pair))
    assert "(512, 128)" in str(cold(pair))
    assert "away" in f"{cold(pair)}"
    assert str(pair.swapped) == str(pair.plain)


@works("identity")
def identity(pair: Twins) -> None:
    p = cold(pair)
    assert p is pair.swapped.get_parameter("head.weight")
    assert p in {p}
    assert {p: 1}[p] == 1
    assert [n for n, _ in pair.swapped.named_parameters()] == [n for n, _ in pair.plain.named_parameters()]
    assert sum(x.numel() for x in pair.swapped.parameters()) == sum(x.numel() for x in pair.plain.parameters())
    assert any(x is p for x in pair.optimizer.param_groups[0]["params"])


@works("new tensors like it")
def like(pair: Twins) -> None:
    p = cold(pair)
    assert torch.zeros_like(pair.plain.head.weight).shape == p.shape
    assert torch.empty(p.shape, dtype=p.dtype, device=p.device).shape == p.shape


@works("requires_grad")
def requires_grad(pair: Twins) -> None:
    p = cold(pair)
    p.requires_grad_(False)
    assert not p.requires_grad
    p.requires_grad = True
    assert p.requires_grad


@works("hooks")
def hooks(pair: Twins) -> None:
    p = cold(pair)
    seen = []
    handles = [p.register_hook(seen.append), p.register_post_accumulate_grad_hook(seen.append)]
    loss_of(pair.swapped, tokens()).backward()
    assert len(seen) == 2
    for handle in handles:
        handle.remove()
    pair.swapped.zero_grad()


@works("gradients")
def gradients(pair: Twins) -> None:
    pair.both(lambda model, _: loss_of(model, tokens()).backward())
    for parameter, other in zip(pair.swapped.parameters(), pair.plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)
    p = cold(pair)
    p.grad = None
    assert p.grad is None
    p.grad = torch.ones(512, 128)
    assert p.grad.sum() == 512 * 128
    del p.grad
    pair.both(lambda model, _: model.zero_grad())


@works("zero_grad to zeros")
def zero_grad(pair: Twins) -> None:
    pair.both(lambda model, _: loss_of(model, tokens()).backward())
    pair.both(lambda model, _: model.zero_grad(set_to_none=False))
    assert all(not p.grad.any() for p in pair.swapped.parameters())
    pair.both(lambda _, optimizer: optimizer.zero_grad())
    assert all(p.grad is None for p in pair.swapped.parameters())


@works("clip_grad_norm_")
def clip(pair: Twins) -> None:
    def run(model: Any, _: Any) -> torch.Tensor:
        loss_of(model, tokens()).backward()
        return nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    pair.both(run)
    for parameter, other in zip(pair.swapped.parameters(), pair.plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)
    pair.both(lambda model, _: model.zero_grad())


@works("train and eval")
def modes(pair: Twins) -> None:
    pair.both(lambda model, _: model.eval() and None)
    pair.both(lambda model, _: model.train() and None)


@works("load_state_dict")
def load(pair: Twins) -> None:
    state = {name: torch.randn_like(value) * 0.05 for name, value in pair.plain.state_dict().items()}
    result = pair.swapped.load_state_dict(state)
    assert not result.missing_keys
    assert not result.unexpected_keys
    pair.plain.load_state_dict(state)
    pair.assert_same_parameters()


@works("load_state_dict of a part")
def load_part(pair: Twins) -> None:
    state = {name: value * 0.9 for name, value in pair.plain.blocks[2].state_dict().items()}
    pair.both(lambda model, _: str(model.blocks[2].load_state_dict(state)))
    pair.assert_same_parameters()


@works("load_state_dict that does not fit")
def load_wrong(pair: Twins) -> None:
    good = {name: value * 1.1 for name, value in pair.plain.state_dict().items()}
    state = {**good, "blocks.1.up.weight": torch.zeros(2), "strange": torch.zeros(1)}
    del state["norm.bias"]
    messages = []
    for model in (pair.plain, pair.swapped):
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            messages.append(str(error))
    assert len(messages) == 2
    assert messages[0] == messages[1]
    pair.assert_same_parameters()  # torch loads what fits
    pair.check_pager()


@works("load_state_dict by reference")
def load_assign(pair: Twins) -> None:
    """assign=True puts other objects in the parameters' places: refused, at the latest by the next forward."""
    state = {"weight": nn.Parameter(torch.ones(512, 128))}
    kept = cold(pair)
    try:
        pair.swapped.head.load_state_dict(state, assign=True)
        loss_of(pair.swapped, tokens())
    except swapper.SwapperError as error:
        assert "manager.gather" in str(error)
    else:
        raise AssertionError("the replaced parameter was accepted")
    pair.swapped.head.weight = kept


@works("a child's forward by itself")
def child(pair: Twins) -> None:
    hidden = torch.randn(3, 128)
    pair.both(lambda model, _: model.blocks[3](hidden).detach())
    pair.both(lambda model, _: model.head(hidden).detach())


@works("functional_call with other values")
def functional(pair: Twins) -> None:
    values = {name: torch.randn(value.shape) * 0.1 for name, value in pair.plain.named_parameters()}
    batch = tokens()
    try:
        result = torch.func.functional_call(pair.swapped, values, batch)
    except swapper.SwapperError as error:
        assert "manager.gather" in str(error)
    else:
        assert torch.equal(result, torch.func.functional_call(pair.plain, values, batch))


def assert_is_stale(pair: Twins, loss: torch.Tensor) -> None:
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        raise AssertionError("a stale graph was accepted")
    pair.swapped.zero_grad()


@works("update between forward and backward")
def stale(pair: Twins) -> None:
    early = loss_of(pair.swapped, tokens())
    pair.both(train_step)
    assert_is_stale(pair, early)


@works("a change between forward and backward")
def change_between(pair: Twins) -> None:
    early = loss_of(pair.swapped, tokens())
    for model, way in ((pair.plain, None), (pair.swapped, pair.manager)):
        with torch.no_grad():
            if way is None:
                model.blocks[1].up.weight.mul_(0.5)
            else:
                with way.gather(model.blocks[1], write=True) as block:
                    block.up.weight.mul_(0.5)
    assert_is_stale(pair, early)


# --- what torch does without asking a tensor's class: the right result or our error -------------------------------------


def unasked(name: str, operation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Add an operation of torch's that takes no notice of subclasses."""

    def check(pair: Twins) -> None:
        try:
            actual = operation(cold(pair))
        except swapper.SwapperError as error:
            assert "manager.gather" in str(error)
        else:
            assert torch.equal(actual, operation(pair.plain.head.weight))

    WORKS[name] = check


unasked("torch.tensor", lambda p: torch.tensor(p))
unasked("torch.as_tensor", lambda p: torch.as_tensor(p, dtype=torch.float64))
unasked("torch.vmap", lambda p: torch.vmap(lambda row: row.sum())(p))
unasked("torch.func.grad", lambda p: torch.func.grad(lambda w: w.square().sum())(p))


def through_dlpack(p: torch.Tensor) -> torch.Tensor:
    p.requires_grad_(False)  # dlpack asks for it
    try:
        return torch.from_dlpack(torch.utils.dlpack.to_dlpack(p)).sum()
    finally:
        p.requires_grad_(True)


unasked("to_dlpack", through_dlpack)

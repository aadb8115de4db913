"""A few hundred operations on a parameter, `p`, a matrix of 512 by 128: reads, views, changes in place, multi-tensor functions.

test_cold_table.py does each to a cold parameter and to a plain one. `q` is another parameter of the same model, of the same shape.
"""

# ruff: noqa: E501, SIM905  # a table

from __future__ import annotations

import copy
import io
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Operation = Callable[[torch.Tensor, torch.Tensor], Any]
TABLE: dict[str, Operation] = {}


def add(name: str, operation: Operation) -> None:
    assert name not in TABLE, name
    TABLE[name] = operation


def like(p: torch.Tensor) -> torch.Tensor:
    """A tensor of the form of `p`, the same each time."""
    return torch.linspace(-1, 1, 512 * 128).view(512, 128)


# --- by name, without arguments ---------------------------------------------------------------------------------------

UNARY = (
    "abs acos angle asin asinh atan atanh ceil clone conj cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 fix floor frac "
    "frexp isfinite isinf isnan isneginf isposinf isreal lgamma log log10 log1p log2 logit neg negative positive rad2deg reciprocal "
    "round rsqrt sgn sigmoid sign signbit sin sinc sinh sqrt square tan tanh trunc relu logical_not nonzero argwhere sum mean prod "
    "std var norm min max amin amax aminmax argmin argmax median nanmean nansum all any count_nonzero numel dim ndimension nelement "
    "size stride tolist unique flatten ravel t adjoint contiguous detach is_contiguous element_size is_complex "
    "is_floating_point is_signed get_device float double half bfloat16 int long bool cpu squeeze unbind data_ptr numpy to_sparse "
    "matrix_exp det logdet trace diag triu tril cumsum_of_all item is_nonzero msort flip_of_all is_shared is_pinned item_of_sum"
).split()  # fmt: skip
for _name in UNARY:
    if hasattr(torch.Tensor, _name):
        add(f"Tensor.{_name}", lambda p, q, name=_name: getattr(p, name)())
    if hasattr(torch, _name):
        add(f"torch.{_name}", lambda p, q, name=_name: getattr(torch, name)(p))

ATTRIBUTES = (
    "shape dtype device layout ndim requires_grad is_leaf grad_fn T mT H mH real data names nbytes itemsize is_cuda is_cpu is_meta "
    "is_sparse is_quantized is_nested grad output_nr imag"
).split()  # fmt: skip
for _name in ATTRIBUTES:
    add(f"attribute {_name}", lambda p, q, name=_name: getattr(p, name))

BINARY = (
    "add sub mul div true_divide floor_divide remainder fmod pow atan2 maximum minimum fmax fmin hypot logaddexp logaddexp2 eq ne lt "
    "le gt ge logical_and logical_or logical_xor dist allclose equal copysign nextafter heaviside xlogy ldexp"
).split()  # fmt: skip
for _name in BINARY:
    add(f"torch.{_name}(p, x)", lambda p, q, name=_name: getattr(torch, name)(p, like(p)))
    add(f"torch.{_name}(x, p)", lambda p, q, name=_name: getattr(torch, name)(like(p), p))
    add(f"torch.{_name}(p, q)", lambda p, q, name=_name: getattr(torch, name)(p, q))
    add(f"torch.{_name}(p, p)", lambda p, q, name=_name: getattr(torch, name)(p, p))

OPERATORS = "add sub mul truediv floordiv mod pow eq ne lt le gt ge matmul neg pos abs invert".split()
for _name in OPERATORS:
    _do = getattr(operator, _name)
    if _name in ("neg", "pos", "abs", "invert"):
        add(f"operator {_name}", lambda p, q, do=_do: do(p))
    elif _name == "matmul":
        add("p @ q.T", lambda p, q: p @ q.T)
        add("x @ p", lambda p, q: torch.ones(3, 512) @ p)
    else:
        add(f"p {_name} 2", lambda p, q, do=_do: do(p, 2.0))
        add(f"2 {_name} p", lambda p, q, do=_do: do(2.0, p))

# --- views ------------------------------------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "view": lambda p: p.view(-1),
    "view to shape": lambda p: p.view(64, 8, 128),
    "view as dtype": lambda p: p.detach().clone().view(torch.int32),
    "data view as dtype": lambda p: p.data.view(torch.int32),
    "reshape": lambda p: p.reshape(128, 512),
    "transpose": lambda p: p.transpose(0, 1),
    "torch.transpose": lambda p: torch.transpose(p, 0, 1),
    "permute": lambda p: p.permute(1, 0),
    "movedim": lambda p: torch.movedim(p, 0, 1),
    "swapaxes": lambda p: p.swapaxes(0, 1),
    "unsqueeze": lambda p: p.unsqueeze(0),
    "expand": lambda p: p.unsqueeze(0).expand(3, 512, 128),
    "broadcast_to": lambda p: torch.broadcast_to(p, (2, 512, 128)),
    "narrow": lambda p: p.narrow(0, 3, 9),
    "select": lambda p: p.select(1, 5),
    "index": lambda p: p[3],
    "negative index": lambda p: p[-1],
    "slice": lambda p: p[2:40:3, ::2],
    "ellipsis": lambda p: p[..., 1],
    "new axis": lambda p: p[None, :, 3],
    "diagonal": lambda p: p.diagonal(),
    "unfold": lambda p: p.unfold(0, 4, 2),
    "as_strided": lambda p: p.as_strided((4, 4), (2, 1)),
    "as_strided from an offset": lambda p: p.as_strided((4, 4), (2, 1), 5),
    "unflatten": lambda p: p.unflatten(0, (2, 256)),
    "chunk": lambda p: p.chunk(3),
    "split": lambda p: p.split(100),
    "split sizes": lambda p: torch.split(p, [12, 500]),
    "tensor_split": lambda p: p.tensor_split(5),
    "hsplit": lambda p: torch.hsplit(p, 2),
    "unbind": lambda p: p.unbind()[7],
    "iterate": lambda p: list(p)[9],
    "unpack": lambda p: (lambda first, *others: first)(*p),
    "data": lambda p: p.data,
    "data of data": lambda p: p.data.data.T,
    "detach of data": lambda p: p.data.detach(),
    "view of view": lambda p: p.t()[4:9].t().unsqueeze(1),
    "view_as": lambda p: p.view_as(torch.ones(128, 512)),
    "expand_as": lambda p: p.expand_as(torch.ones(2, 512, 128)),
    "contiguous": lambda p: p.contiguous(),
    "contiguous of a view": lambda p: p.t().contiguous(),
    "to the same": lambda p: p.to("cpu"),
    "squeeze of a view": lambda p: p[:1].squeeze(),
}
for _name, _view in VIEWS.items():
    add(f"{_name}", lambda p, q, view=_view: view(p))
    add(f"{_name}: form", lambda p, q, view=_view: [form(t) for t in several(view(p))])
    add(f"{_name}: sum", lambda p, q, view=_view: sum(t.float().sum() for t in several(view(p))))
    add(f"{_name}: times x", lambda p, q, view=_view: [t * 3 for t in several(view(p))])
    add(f"{_name}: kept by autograd", lambda p, q, view=_view: [t.float().square() for t in several(view(p))])


def several(views: Any) -> list[torch.Tensor]:
    return list(views) if isinstance(views, list | tuple) else [views]


def form(tensor: torch.Tensor) -> Any:
    return (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.requires_grad,
        tensor.is_leaf,
        type(tensor.grad_fn).__name__,
    )


# --- reads ------------------------------------------------------------------------------------------------------------

READS: dict[str, Operation] = {
    "index by list": lambda p, q: p[[1, 5, 2]],
    "index by tensor": lambda p, q: p[torch.tensor([1, 2])],
    "index by mask": lambda p, q: p[p > 0],
    "index by two": lambda p, q: p[torch.arange(4), 2:5],
    "index another by it": lambda p, q: torch.ones(3)[p.abs().long() % 3],
    "gather": lambda p, q: p.gather(1, torch.zeros(512, 2, dtype=torch.long)),
    "take": lambda p, q: p.take(torch.tensor([0, 100, 65535])),
    "index_select": lambda p, q: torch.index_select(p, 0, torch.tensor([5, 9])),
    "masked_select": lambda p, q: torch.masked_select(p, like(p) > 0.99),
    "where": lambda p, q: torch.where(like(p) > 0, p, 0.0),
    "where by it": lambda p, q: torch.where(p > 0, p, q),
    "cat": lambda p, q: torch.cat([p, like(p), q]),
    "cat twice": lambda p, q: torch.cat([p, p]),
    "stack": lambda p, q: torch.stack([p, q]),
    "vstack": lambda p, q: torch.vstack((p, q)),
    "sort": lambda p, q: torch.sort(p, dim=1),
    "topk": lambda p, q: p.flatten().topk(5),
    "kthvalue": lambda p, q: p.kthvalue(3, dim=1),
    "cumsum": lambda p, q: p.cumsum(1),
    "logsumexp": lambda p, q: p.logsumexp(1),
    "softmax": lambda p, q: p.softmax(-1),
    "log_softmax": lambda p, q: F.log_softmax(p, 0),
    "renorm": lambda p, q: torch.renorm(p, 2, 0, 1.0),
    "clamp": lambda p, q: p.clamp(-0.1, 0.1),
    "clamp by it": lambda p, q: like(p).clamp(min=p),
    "lerp": lambda p, q: torch.lerp(p, q, 0.3),
    "lerp_ another by it": lambda p, q: torch.zeros(512, 128).lerp_(p.detach(), 0.1),
    "add_ it to another": lambda p, q: torch.zeros(512, 128).add_(p, alpha=2),
    "copy_ it to another": lambda p, q: torch.zeros(512, 128).copy_(p),
    "copy_ it into a part": lambda p, q: (lambda x: (x[3].copy_(p), x)[1])(torch.zeros(4, 512, 128)),
    "addmm": lambda p, q: torch.addmm(torch.zeros(3, 128), torch.ones(3, 512), p),
    "addcmul": lambda p, q: torch.addcmul(p, p, q, value=0.5),
    "baddbmm": lambda p, q: torch.bmm(p.unsqueeze(0), q.t().unsqueeze(0)),
    "einsum": lambda p, q: torch.einsum("ij,kj->ik", p, q),
    "einsum with itself": lambda p, q: torch.einsum("ij,kj->ik", p, p),
    "tensordot": lambda p, q: torch.tensordot(p, q, 2),
    "kron": lambda p, q: torch.kron(p[:4, :4], q[:3, :3]),
    "outer": lambda p, q: torch.outer(p[0], q[1]),
    "dot": lambda p, q: torch.dot(p.view(-1), q.view(-1)),
    "mv": lambda p, q: p.mv(torch.ones(128)),
    "cdist": lambda p, q: torch.cdist(p[:9], q[:9]),
    "linear": lambda p, q: F.linear(torch.ones(2, 128), p),
    "linear of what has a gradient": lambda p, q: F.linear(torch.ones(2, 128, requires_grad=True), p),
    "bilinear": lambda p, q: F.bilinear(torch.ones(2, 8), torch.ones(2, 16), p.view(512, 8, 16)),
    "embedding": lambda p, q: F.embedding(torch.tensor([3, 3, 1]), p),
    "embedding_bag": lambda p, q: F.embedding_bag(torch.tensor([[3, 3], [1, 2]]), p),
    "conv1d": lambda p, q: F.conv1d(torch.ones(1, 8, 20), p.view(512, 8, 16)),
    "conv2d": lambda p, q: F.conv2d(torch.ones(1, 8, 9, 9), p.view(512, 8, 4, 4)),
    "layer_norm": lambda p, q: F.layer_norm(p, (128,)),
    "layer_norm by it": lambda p, q: F.layer_norm(torch.ones(3, 128).cumsum(1), (128,), p[0], p[1]),
    "batch_norm": lambda p, q: F.batch_norm(p, None, None, training=True),
    "group_norm": lambda p, q: F.group_norm(p, 4),
    "normalize": lambda p, q: F.normalize(p, dim=1),
    "dropout": lambda p, q: F.dropout(p, 0.3),
    "dropout that does nothing": lambda p, q: F.dropout(p, 0.3, training=False),
    "gelu": lambda p, q: F.gelu(p),
    "prelu": lambda p, q: F.prelu(torch.ones(2, 128) * -1, p[0]),
    "mse_loss": lambda p, q: F.mse_loss(p, q),
    "cosine_similarity": lambda p, q: F.cosine_similarity(p, q),
    "cross_entropy": lambda p, q: F.cross_entropy(p, torch.arange(512) % 128),
    "attention": lambda p, q: F.scaled_dot_product_attention(p.view(1, 4, 128, 128), q.view(1, 4, 128, 128), q.view(1, 4, 128, 128)),
    "pad": lambda p, q: F.pad(p, (1, 2)),
    "interpolate": lambda p, q: F.interpolate(p.view(1, 1, 512, 128), scale_factor=0.5),
    "linalg.norm": lambda p, q: torch.linalg.norm(p),
    "linalg.vector_norm": lambda p, q: torch.linalg.vector_norm(p, 3),
    "linalg.matrix_norm": lambda p, q: torch.linalg.matrix_norm(p),
    "linalg.svdvals": lambda p, q: torch.linalg.svdvals(p),
    "linalg.qr": lambda p, q: torch.linalg.qr(p),
    "linalg.solve": lambda p, q: torch.linalg.solve(p[:128] + torch.eye(128), q[:128]),
    "norm of dim": lambda p, q: p.norm(dim=1, keepdim=True),
    "std of dim": lambda p, q: p.std(dim=0),
    "var_mean": lambda p, q: torch.var_mean(p, 1),
    "histc": lambda p, q: torch.histc(p.detach(), 10),
    "bincount": lambda p, q: torch.bincount((p.detach() > 0).view(-1).long()),
    "quantile": lambda p, q: torch.quantile(p, 0.3, dim=1),
    "bernoulli": lambda p, q: torch.bernoulli(p.sigmoid()),
    "multinomial": lambda p, q: torch.multinomial(p.abs(), 3),
    "normal": lambda p, q: torch.normal(p, 1.0),
    "roll": lambda p, q: p.roll(3, 0),
    "flip": lambda p, q: p.flip(0),
    "repeat": lambda p, q: p.repeat(2, 1),
    "repeat_interleave": lambda p, q: p.repeat_interleave(2, 0),
    "tile": lambda p, q: torch.tile(p, (1, 2)),
    "meshgrid": lambda p, q: torch.meshgrid(p[0], q[0], indexing="ij"),
    "broadcast_tensors": lambda p, q: torch.broadcast_tensors(p, torch.ones(1))[1],
    "view of complex": lambda p, q: torch.view_as_complex(p.view(512, 64, 2)),
    "fft": lambda p, q: torch.fft.rfft(p),
    "stft": lambda p, q: torch.stft(p.view(-1)[:4096], 64, window=torch.ones(64), return_complex=True),
    "to another dtype": lambda p, q: p.to(torch.float64),
    "to by dtype and copy": lambda p, q: p.to(torch.float32, copy=True),
    "type_as another": lambda p, q: p.type_as(torch.ones(1, dtype=torch.float16)),
    "type": lambda p, q: p.type(),
    "type by name": lambda p, q: p.type(torch.float16),
    "numpy of a copy": lambda p, q: torch.from_numpy(p.detach().clone().numpy()),
    "item of an element": lambda p, q: p[3, 4].item(),
    "float of an element": lambda p, q: float(p[3, 4]),
    "int of an element": lambda p, q: int(p[3, 4] * 1000),
    "bool of an element": lambda p, q: bool(p[3, 4]),
    "format of an element": lambda p, q: f"{p[3, 4].item():.6f}",
    "contains": lambda p, q: math.pi in p,
    "deepcopy": lambda p, q: copy.deepcopy(p),
    "deepcopy of its data": lambda p, q: copy.deepcopy(p.data),
    "deepcopy of a list": lambda p, q: copy.deepcopy([p, q, p])[2],
    "save and load": lambda p, q: saved(p),
    "parameters_to_vector": lambda p, q: nn.utils.parameters_to_vector([p, q]),
    "foreach_norm": lambda p, q: torch._foreach_norm([p, q]),
    "foreach_mul": lambda p, q: torch._foreach_mul([p, q], 2.0),
    "foreach_add": lambda p, q: torch._foreach_add([p.data, q.data], [q.data, p.data], alpha=2.0),
    "total norm": lambda p, q: nn.utils.get_total_norm([p.data, q.data]) if hasattr(nn.utils, "get_total_norm") else 0,
    "sparse product": lambda p, q: torch.sparse.mm(torch.eye(512).to_sparse(), p),
    "checkpointed": lambda p, q: torch.utils.checkpoint.checkpoint(lambda x: (x @ p.t()).relu() @ q, torch.ones(2, 128, requires_grad=True), use_reentrant=False),
    "own function": lambda p, q: Doubled.apply(p),
}  # fmt: skip
for _name, _read in READS.items():
    add(_name if _name not in TABLE else f"{_name} of p", _read)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(value)
        return value * value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


def saved(p: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save({"p": p}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["p"]


LIKE: dict[str, Operation] = {
    "new_zeros": lambda p, q: p.new_zeros(3, 4),
    "new_ones": lambda p, q: p.new_ones((2,)),
    "new_full": lambda p, q: p.new_full((2, 2), 7.0),
    "new_tensor": lambda p, q: p.new_tensor([1.0, 2.0]),
    "new_empty": lambda p, q: p.new_empty((3, 4)).zero_(),
    "zeros_like": lambda p, q: torch.zeros_like(p),
    "ones_like": lambda p, q: torch.ones_like(p, dtype=torch.float64),
    "full_like": lambda p, q: torch.full_like(p, 2.0),
    "empty_like": lambda p, q: torch.empty_like(p).zero_(),
    "empty_like of a view": lambda p, q: torch.empty_like(p.t()).zero_(),
    "rand_like": lambda p, q: torch.rand_like(p),
    "randn_like": lambda p, q: torch.randn_like(p),
    "randint_like": lambda p, q: torch.randint_like(p, 9),
    "bernoulli of zeros_like": lambda p, q: torch.zeros_like(p).bernoulli_(0.5),
    "x.type_as(p)": lambda p, q: torch.ones(3, dtype=torch.float64).type_as(p),
    "x.to(p)": lambda p, q: torch.ones(3, dtype=torch.float64).to(p),
    "x.view_as(p)": lambda p, q: torch.ones(512 * 128).view_as(p),
    "x.reshape_as(p)": lambda p, q: torch.ones(512 * 128).reshape_as(p),
    "x.expand_as(p)": lambda p, q: torch.ones(128).expand_as(p),
    "result_type": lambda p, q: torch.result_type(p, q),
    "is_same_size": lambda p, q: torch.is_same_size(p, q),
    "zeros by its options": lambda p, q: torch.zeros(p.shape, dtype=p.dtype, device=p.device, layout=p.layout),
    "len": lambda p, q: len(p),
    "hash": lambda p, q: p in {p} and q not in {p},
    "isinstance": lambda p, q: isinstance(p, nn.Parameter) and isinstance(p.data, torch.Tensor),
    "is_tensor": lambda p, q: torch.is_tensor(p),
    "size of a dim": lambda p, q: (p.size(0), p.stride(1), p.T.shape, p.data.shape, p.view(-1).shape),
    "dim_order": lambda p, q: p.dim_order(),
}
for _name, _like in LIKE.items():
    add(_name if _name not in TABLE else f"{_name} of p", _like)

# --- changes in place -------------------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_": lambda p: p.add_(0.5),
    "add_ another": lambda p: p.add_(like(p), alpha=-0.1),
    "mul_": lambda p: p.mul_(0.9),
    "copy_": lambda p: p.copy_(like(p)),
    "zero_": lambda p: p.zero_(),
    "fill_": lambda p: p.fill_(0.25),
    "clamp_": lambda p: p.clamp_(-0.1, 0.1),
    "lerp_": lambda p: p.lerp_(like(p), 0.1),
    "addcmul_": lambda p: p.addcmul_(like(p), like(p), value=0.1),
    "addcdiv_": lambda p: p.addcdiv_(like(p), like(p) + 3, value=0.1),
    "sign_": lambda p: p.sign_(),
    "normal_": lambda p: p.normal_(),
    "uniform_": lambda p: p.uniform_(),
    "bernoulli_": lambda p: p.bernoulli_(0.5),
    "copysign_": lambda p: p.copysign_(like(p)),
    "index_fill_": lambda p: p.index_fill_(0, torch.tensor([1, 4]), 2.0),
    "index_add_": lambda p: p.index_add_(0, torch.tensor([1, 1]), torch.ones(2, 128)),
    "scatter_": lambda p: p.scatter_(0, torch.zeros(1, 128, dtype=torch.long), 3.0),
    "masked_fill_": lambda p: p.masked_fill_(like(p) > 0, 1.0),
    "fill_diagonal_": lambda p: p.fill_diagonal_(2.0),
    "set item": lambda p: p.__setitem__(0, 1.0),
    "set slice": lambda p: p.__setitem__((slice(2, 5), 3), torch.ones(3)),
    "set by mask": lambda p: p.__setitem__(like(p) > 0.5, 0.0),
    "+=": lambda p: operator.iadd(p, 1.0),
    "-=": lambda p: operator.isub(p, like(p)),
    "*=": lambda p: operator.imul(p, 0.5),
    "/=": lambda p: operator.itruediv(p, 3.0),
    "out=": lambda p: torch.add(like(p), 1, out=p),
    "matmul out=": lambda p: torch.mm(torch.ones(512, 4), torch.ones(4, 128), out=p),
    "init.normal_": lambda p: nn.init.normal_(p),
    "init.uniform_": lambda p: nn.init.uniform_(p),
    "init.xavier_uniform_": lambda p: nn.init.xavier_uniform_(p),
    "init.kaiming_normal_": lambda p: nn.init.kaiming_normal_(p),
    "init.orthogonal_": lambda p: nn.init.orthogonal_(p),
    "init.trunc_normal_": lambda p: nn.init.trunc_normal_(p),
    "init.zeros_": lambda p: nn.init.zeros_(p),
    "row by row": lambda p: [row.mul_(n) for n, row in enumerate(p[:5])] and None,
    "a view of it": lambda p: p.view(-1)[:7].zero_() is None,
    "its transpose": lambda p: p.t().add_(1.0) is None,
    "a view's out=": lambda p: torch.add(torch.ones(128), 1, out=p[3]) is None,
    "foreach_add_": lambda p: torch._foreach_add_([p], 1.0),
    "foreach_lerp_": lambda p: torch._foreach_lerp_([p], [like(p)], 0.5) if hasattr(torch, "_foreach_lerp_") else None,
    "foreach_copy_": lambda p: torch._foreach_copy_([p], [like(p)]),
    "relu in place": lambda p: F.relu(p, inplace=True),
    "dropout in place": lambda p: F.dropout(p, 0.5, inplace=True),
    "t_": lambda p: p.t_().t_(),
    "resize_": lambda p: p.resize_(512, 128),
    "apply_": lambda p: p.apply_(lambda value: value + 1),
    "renorm_": lambda p: p.renorm_(2, 0, 0.5),
    "embedding with max_norm": lambda p: F.embedding(torch.tensor([3, 1]), p, max_norm=0.1),
}
for _name, _change in CHANGES.items():
    add(f"{_name} without a graph", lambda p, q, change=_change: without_graph(change, p))
    add(f"{_name} of .data", lambda p, q, change=_change: change(p.data))
    add(f"{_name} of .data and read", lambda p, q, change=_change: (change(p.data), p.sum(), p.data.sum())[1:])
    add(f"{_name} with a graph", lambda p, q, change=_change: change(p))
    add(f"{_name} of .detach()", lambda p, q, change=_change: change(p.detach()))
add("copy_ of q", lambda p, q: without_graph(lambda p: p.copy_(q), p))
add("lerp_ towards q", lambda p, q: without_graph(lambda p: p.lerp_(q, 0.1), p))
add("data.mul_.add_ of q.data", lambda p, q: p.data.mul_(0.9).add_(q.data, alpha=0.1))
add("add_ of itself", lambda p, q: without_graph(lambda p: p.add_(p), p))
add("add_ of its own transpose", lambda p, q: without_graph(lambda p: p[:128].add_(p[:128].t()), p))
add("swap with q", lambda p, q: without_graph(lambda p: (p.copy_(torch.stack([q, p])[0]), q.copy_(p))[1], p))
add(
    "embedding with max_norm by position",
    lambda p, q: without_graph(lambda p: F.embedding(torch.tensor([3, 1]), p, None, 0.1), p),
)
add("set data", lambda p, q: setattr(p, "data", torch.zeros(512, 128)))
add("vector_to_parameters", lambda p, q: nn.utils.vector_to_parameters(torch.zeros(p.numel()), [p]))


@torch.no_grad()
def without_graph(change: Callable[[torch.Tensor], Any], p: torch.Tensor) -> Any:
    return change(p)


# --- graphs -----------------------------------------------------------------------------------------------------------

add("backward", lambda p, q: (p * p).sum().backward())
add("backward through two", lambda p, q: ((p @ q.t()).relu() @ p).square().mean().backward())
add("backward of a view", lambda p, q: p.view(-1).backward(torch.ones(512 * 128)))
add("backward of itself", lambda p, q: p.backward(torch.ones(512, 128)))
add("autograd.grad", lambda p, q: torch.autograd.grad((p * q).sum(), [p, q]))
add(
    "autograd.grad twice",
    lambda p, q: [torch.autograd.grad(x, p, retain_graph=n == 0) for x in [(p.exp() * q).sum()] for n in (0, 1)],
)
add("autograd.grad of a norm", lambda p, q: torch.autograd.grad(p.norm(), p))
add(
    "double backward",
    lambda p, q: torch.autograd.grad(torch.autograd.grad((p.pow(3) * q).sum(), p, create_graph=True)[0].sum(), [p, q]),
)
add("gradient edge", lambda p, q: torch.autograd.graph.get_gradient_edge(p).output_nr)
add("changed between", lambda p, q: (lambda y: (without_graph(lambda p: p.add_(1), p), y.backward()))((p * p).sum()))
add("data changed between", lambda p, q: (lambda y: (p.data.add_(1), y.backward()))((p * p).sum()))
add("func.grad", lambda p, q: torch.func.grad(lambda w: w.square().sum())(p))
add("func.vmap", lambda p, q: torch.vmap(lambda row: row.sum())(p))
add("torch.tensor", lambda p, q: torch.tensor(p.detach()))
add("as_tensor", lambda p, q: torch.as_tensor(p, dtype=torch.float64))

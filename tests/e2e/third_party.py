"""Optimizers as people write them: what torch's own do not do, swapper must not trip over."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.optim import AdamW, Optimizer


class PerParameter(Optimizer):
    """Updates one parameter with a gradient after the other, as most do. `SETTINGS` are the defaults of its groups."""

    SETTINGS: ClassVar[dict[str, Any]] = {"lr": 1e-2}

    def __init__(self, params: Any, **settings: Any):
        super().__init__(params, {**self.SETTINGS, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            self._begin(group)
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, self.state[p], group)

    def _begin(self, group: dict[str, Any]) -> None: ...

    def _update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(PerParameter):
    """Sign of an interpolated momentum; its state is made lazily, with `.data` throughout, as older code does."""

    SETTINGS: ClassVar[dict[str, Any]] = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.1}

    def _update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if len(state) == 0:
            state["exp_avg"] = torch.zeros_like(p)
        beta1, beta2 = group["betas"]
        p.data.mul_(1 - group["lr"] * group["weight_decay"])
        update = state["exp_avg"].clone().mul_(beta1).add(p.grad, alpha=1 - beta1).sign_()
        p.add_(update, alpha=-group["lr"])
        state["exp_avg"].mul_(beta2).add_(p.grad, alpha=1 - beta2)


class Rebinding(PerParameter):
    """Counts in Python numbers, replaces its tensors and `p.data` instead of changing them, and keeps what is no tensor."""

    SETTINGS: ClassVar[dict[str, Any]] = {"lr": 1e-2, "seen": 0}

    def __init__(self, params: Any, **settings: Any):
        super().__init__(params, **settings)
        self.calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        super().step()

    def _begin(self, group: dict[str, Any]) -> None:
        group["seen"] += 1

    def _update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        state["note"] = None if state["step"] < 3 else "warm"
        old = state.get("velocity")
        state["velocity"] = p.grad.clone() if old is None else old * 0.9 + p.grad
        p.data = p.data - group["lr"] / (self.calls + group["seen"]) * state["velocity"]


class Whitening(PerParameter):
    """A factor for each dimension in a list, and its eigenvectors in another, made every third step in LAPACK's order of
    memory, as SOAP does; vectors have lists without a tensor."""

    SETTINGS: ClassVar[dict[str, Any]] = {"lr": 1e-2, "basis_steps": 3}

    def _update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        grad = p.grad.float()
        if not state:
            sizes = p.shape if p.dim() == 2 else ()
            state.update(step=0, factors=[torch.eye(size) for size in sizes] or [[]], bases=None)
        if p.dim() == 2:
            for factor, product in zip(state["factors"], (grad @ grad.t(), grad.t() @ grad), strict=True):
                factor.lerp_(product, 0.1)
        if state["step"] % group["basis_steps"] == 0:
            state["bases"] = [torch.linalg.eigh(one)[1] if len(one) else [] for one in state["factors"]]
        state["step"] += 1
        if p.dim() == 2:
            left, right = state["bases"]
            turned = (left.t() @ grad @ right).sign() + right.sum(0)  # a sum depends on the order of memory
            grad = left @ turned @ right.t()
        p.add_(grad.to(p.dtype), alpha=-group["lr"])


class FactoredRms(PerParameter):
    """State of other shapes: a mean for each row and each column; vectors have a whole one. Weight decay by dimensions."""

    def _update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        square = p.grad.float().square()
        if p.dim() < 2:
            state["whole"] = square if "whole" not in state else state["whole"] * 0.9 + square * 0.1
            scale = state["whole"]
        else:
            p.mul_(0.999)
            for name, dim in (("row", -1), ("column", 0)):
                mean = square.mean(dim)
                state[name] = mean if name not in state else state[name] * 0.9 + mean * 0.1
            scale = state["row"].unsqueeze(-1) * state["column"]
            state.setdefault("shape", list(p.shape[:0]))
        p.add_((p.grad.float() / (scale.sqrt() + 1e-3)).to(p.dtype), alpha=-group["lr"])


class Scaled(AdamW):
    """A user's subclass: something before AdamW's own step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)
        return super().step(closure)


class Coupled(PerParameter):
    """Divides by the norm over all parameters: one slice after the other would give other values."""

    def _begin(self, group: dict[str, Any]) -> None:
        self.norm = torch.stack([p.grad.float().norm() for p in group["params"] if p.grad is not None]).norm()

    def _update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(p.grad / self.norm.to(p.dtype), alpha=-group["lr"])


class Noisy(Lion):
    """Langevin dynamics: random numbers for each parameter."""

    def _update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super()._update(p, state, group)
        p.add_(torch.randn_like(p), alpha=1e-3)


class Wrapper(Optimizer):
    """Lookahead, and the like: another optimizer inside."""

    def __init__(self, params: Any):
        super().__init__(params, {"lr": 1e-2})
        self.inner = AdamW(self.param_groups[0]["params"], lr=1e-2)

    def step(self, closure: Any = None) -> Any:
        self.inner.step()


class Remembering(Lion):
    """Keeps its parameters outside of its groups."""

    def __init__(self, params: Any):
        super().__init__(params)
        self.flat = {"all": [p for group in self.param_groups for p in group["params"]]}


class GlobalState(PerParameter):
    """Keeps state that belongs to no parameter."""

    def _begin(self, group: dict[str, Any]) -> None:
        self.state["all"]["step"] = self.state["all"].get("step", 0) + 1

    def _update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(p.grad, alpha=group["lr"])


class LowBit(PerParameter):
    """Keeps the momentum of tensors of 4,096 elements and more in 8 bits, as bitsandbytes and, in whole blocks, torchao do."""

    def _update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        coded = p.numel() >= 4096 and p.numel() % 256 == 0
        momentum = (state["momentum"].float() / 127 if coded else state["momentum"]) if state else p.grad
        momentum = momentum.lerp(p.grad, 0.1)
        state["momentum"] = momentum.clamp(-1, 1).mul(127).round().to(torch.int8) if coded else momentum
        p.sub_(momentum, alpha=group["lr"])


class Quantized(torch.Tensor):
    """A tensor of another class, as torchao's."""


class LowBitTensors(LowBit):
    """Keeps the momentum of such tensors in a class of its own, as torchao does."""

    def _update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super()._update(p, state, group)
        if state["momentum"].dtype == torch.int8:
            state["momentum"] = state["momentum"].float().as_subclass(Quantized)


class ListOfLists(Lion):
    """Keeps tensors in a list within a list."""

    def _update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super()._update(p, state, group)
        state["factors"] = [[torch.eye(size) for size in p.shape]]


class NeedsClosure(Lion):
    """Evaluates the loss twice in a step, as SAM does."""

    def step(self, closure: Any) -> Any:
        closure()
        return super().step(closure)


class ScheduleFree(PerParameter):
    """Trains at a point between an average and a fast iterate; `eval()` replaces the parameters by the average, `train()` back."""

    SETTINGS: ClassVar[dict[str, Any]] = {"lr": 1e-2, "beta": 0.9, "k": 0, "train_mode": False}

    @torch.no_grad()
    def _move(self, is_training: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not is_training:
                for p in group["params"]:
                    if "z" in (state := self.state[p]):
                        p.lerp_(state["z"], weight=1 - (group["beta"] if is_training else 1 / group["beta"]))
                group["train_mode"] = is_training

    def train(self) -> None:
        self._move(True)

    def eval(self) -> None:
        self._move(False)

    def _begin(self, group: dict[str, Any]) -> None:
        if not group["train_mode"]:
            raise RuntimeError("call train() first")
        group["k"] += 1

    def _update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "z" not in state:
            state["z"] = p.clone()
        p.lerp_(state["z"], weight=1 / group["k"])
        p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"]) - 1))
        state["z"].sub_(p.grad, alpha=group["lr"])


class Normalizing(PerParameter):
    """Writes to the gradients that it is given, as schedulefree's AdamW does."""

    SETTINGS: ClassVar[dict[str, Any]] = {"lr": 1e-2}

    def _update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["square"] = state.get("square", 0) + p.grad.square()
        p.sub_(p.grad.div_(1 + state["square"].sqrt()), alpha=group["lr"])


class SquareOfVectors(PerParameter):
    """Keeps a square matrix for a vector, as Shampoo does, which takes minutes for a root of a large one."""

    def _update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        assert p.numel() <= 2048, "this would take minutes"
        flat = p.grad.reshape(-1, 1)
        state["square"] = state.get("square", 0) + flat @ flat.T
        p.sub_(p.grad / (1 + state["square"].diagonal().sqrt().view_as(p)), alpha=group["lr"])


class Sophia(PerParameter):
    """Divides by a curvature that another method estimates from gradients, every few steps."""

    SETTINGS: ClassVar[dict[str, Any]] = {"lr": 1e-2, "decay": 0.9}
    estimates = 0

    @torch.no_grad()
    def update_hessian(self, scale: float = 1.0) -> int:
        self.estimates += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self._begun(p)
                    state["hessian"].mul_(group["decay"]).addcmul_(p.grad, p.grad, value=scale * (1 - group["decay"]))
        return self.estimates

    def _begun(self, p: torch.Tensor) -> Any:
        state = self.state[p]
        if len(state) == 0:
            state["step"] = 0
            state["momentum"] = torch.zeros_like(p)
            state["hessian"] = torch.zeros_like(p)
        return state

    def _update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state = self._begun(p)
        state["step"] += 1
        state["momentum"].mul_(0.9).add_(p.grad, alpha=0.1)
        p.sub_((state["momentum"] / (state["hessian"] + 1e-3)).clamp(-1, 1), alpha=group["lr"])

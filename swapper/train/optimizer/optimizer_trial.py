"""Tries an optimizer on small tensors: finds out its state for a parameter, and whether a parameter may be cut.

It lists no optimizer, except for properties that a trial cannot find. Two tensors of the parameter's dtype and number
of dimensions take a few steps with the user's own settings: together, each alone, and one of them cut into flat pieces;
everything is compared bit for bit.

[Note: what the trial decides] *Together and apart differ*: the optimizer couples parameters, and a sweep slice by slice
would give other values; refused. *Whole and cut differ*: parameters are updated whole (Adafactor, Muon). The pieces of
the trial are shorter than a run of torch's vector code, so equality means that an element's position does not matter at
all. torch's fused kernels do depend on it, within runs of 8 (fp32) or 16 (bf16, fp16) elements: they are cut at
multiples of 64 (train/layout/slices.py), in the trial too. Code that is not torch's own may look at more later, or from some
size on: it must be elementwise by its names too (own_code.py).

[Note: bf16 and fp16] There torch's vector and scalar code round differently in most operations that unfused optimizers
use, in one element of a few thousand: plain torch itself then depends on the number of threads. A short trial may miss
that, so in addition to passing it an optimizer must be one whose operations were inspected: AdamW, Adam without weight
decay, Rprop; fused AdamW, Adam and Adagrad. All others are updated whole there.

[Note: shapes of state] The shape of a state tensor follows from the parameter's: each of its dimensions is one of the
parameter's or a constant (Adafactor's factors). Two tensors with different sizes in all dimensions show which.

[Note: large tensors] Low-bit optimizers keep the state of parameters of 4,096 elements or more in another form than that
of smaller ones: bitsandbytes of all, torchao of those in whole blocks of 256. A tensor of at least twice as many takes
one more step, and its state must have the form that the small ones showed. Not if that state had more than
MAX_TRIAL_STATE elements: Shampoo has two square matrices for a vector, and takes minutes for the root of a large one.

[Note: what happens later] Unknown code may have rules that begin later: a warm-up, something every hundredth step. So more steps
are tried from advanced counters: those of its state, groups and attributes that grew by one in a step are set to just below each
whole number in its code and settings, and to large ones. There are more tensors in such a step, as a rule may look at places in a
group, with larger and smaller gradients. What such steps do not show is found in the step that does it (optimizer_proxy.py).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Adagrad, Adam, AdamW, Optimizer, Rprop

from swapper.errors import UnsupportedError
from swapper.train.optimizer.entries import Iterations, StateForm, StateKey, axes_of, flat, is_plain, order_of
from swapper.train.optimizer.optimizer_proxy import OptimizerProxy, Work, coupling, is_same
from swapper.train.optimizer.optimizer_set import NARROW, copy_for_trial, has_modes, kind_of
from swapper.train.optimizer.own_code import advanced, is_known, may_be_elementwise, sees_places, targets_of

STEPS = 4
"""Of the trial: state that appears later is not seen. More where a setting says so: see `steps_of`."""
MAX_STEPS = 24
"""Of the trial: one of Shampoo takes 10 ms."""
RARE = ("freq", "steps", "interval", "every")
"""In the names of settings that say in which steps an optimizer does more than in others."""
SHAPES: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((), ()),
    ((1031,), (613,)),
    ((31, 37), (29, 23)),
    ((7, 11, 13), (5, 17, 8)),
    ((3, 5, 7, 11), (5, 3, 11, 8)),
    ((2, 3, 5, 7, 11), (3, 4, 7, 5, 2)),
)
"""By number of dimensions, two shapes for the trial; no dimension of one is the same in the other."""
LARGE_SHAPES: tuple[tuple[int, ...], ...] = ((), (8192,), (128, 96), (32, 16, 24), (8, 16, 12, 8), (8, 4, 12, 4, 8))
"""By number of dimensions, a shape of 8,192 elements or more, in whole blocks. See [Note: large tensors]."""
MAX_TRIAL_STATE = 1 << 20
"""Elements of state of a tensor of LARGE_SHAPES. See [Note: large tensors]."""
FEWER_BITS = "use torch.optim.AdamW, or another that keeps fp32, and state_codec='8bit', which stores that in 8 bits"
CUT_NARROW: tuple[type[Optimizer], ...] = (AdamW, Adam, Rprop)
CUT_NARROW_FUSED: tuple[type[Optimizer], ...] = (AdamW, Adam, Adagrad)
"""See [Note: bf16 and fp16]."""

CROWD = 4
"""Tensors in addition to the two; as many as the group has, up to MAX_CROWD, of code that may look at places."""
MAX_CROWD = 64
LATE_SCALES = (1.0, 1e-3, 1e3)
"""Of gradients, by step. See [Note: what happens later]."""


Template = Callable[[tuple[int, ...], torch.dtype], dict[str, Any]]
"""Returns the state that an optimizer makes in its constructor, for a parameter of a shape and dtype."""


class OptimizerTrial:
    """A few steps on two small tensors, in several ways, taken by clones of the optimizer.

    Args:
        template: see `template_of`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        settings: int,
        dtype: torch.dtype,
        shapes: tuple[tuple[int, ...], tuple[int, ...]],
        template: Template | None = None,
    ) -> None:
        self._template = template
        self._optimizer = optimizer
        self._settings = settings
        self._dtype = dtype
        self._shapes = shapes
        self._kind = kind_of(optimizer)
        self._is_known = is_known(optimizer)
        self._marks = _marks_in(optimizer.param_groups[settings], len(shapes[0]))
        self._passed: dict[int, int] = {}  # the most passes of a call, by how many tensors it had
        self._after: list[tuple[list[Any], Any]] = []  # after each of the first steps: states, and the optimizer
        generator = torch.Generator().manual_seed(0x5AFE)
        self._values = [_random(shape, dtype, generator) for shape in shapes]
        self._steps = steps_of(optimizer.param_groups[settings])
        self._gradients = [[_random(shape, dtype, generator) for shape in shapes] for _ in range(self._steps)]
        self._initial: Callable[[tuple[int, ...]], dict[str, Any]] = lambda shape: {}
        self._always: set[str] | None = None
        self._seen: list[dict[str, list[torch.Tensor]]] = [{}, {}]  # tensors of state after each step, by key
        self._changes_gradient = False

    def run(self) -> StateForm:
        together = self._take_steps([[0, 1]])
        apart = self._take_steps([[0], [1]])
        if not is_same(together, apart):
            raise coupling(self._kind)
        if not self._is_known:
            self._check_crowd()
            for target in targets_of(self._optimizer, is_slow=self._has_factors()):
                self._check_late(target)
        keys = tuple(self._key(name) for name in self._seen[0])
        always = frozenset(self._always or ())
        self._check_large(keys)
        sets = self._changed_settings(together[1])
        may_cut = self._may_cut(keys, apart[0][0])
        starts_together = not self._may_start_late()
        passes = None if self._is_known else self._passes()
        return StateForm(keys, always, may_cut, starts_together, sets, passes, self._changes_gradient)

    def _passes(self) -> Iterations:
        """Return how often calls may go through parameters, which grows with their number at most as in the trial."""
        counts = sorted(self._passed)
        each = max([0, *(-(-(self._passed[n] - self._passed[1]) // (n - 1)) for n in counts if n > 1)])
        return Iterations(max(0, *(self._passed[n] - each * n for n in counts)), each)

    def _has_factors(self) -> bool:
        """Return True if it keeps matrices of another shape than the parameter's, whose roots and bases take long."""
        found = (t for seen in self._seen[:1] for tensors in seen.values() for t in tensors[:1])
        return any(t.dim() > 1 and t.shape != self._values[0].shape for t in found)

    def _check_crowd(self) -> None:
        """Raise UnsupportedError if a tensor's place in its group, or how many there are, matters."""
        many = self._crowd()
        crowded = self._take_steps([many], count=len(many), steps=2)
        if not _is_alike(crowded, self._take_steps([[0], [1]], steps=2)):
            raise coupling(self._kind)

    def _crowd(self) -> list[int]:
        group = self._optimizer.param_groups[self._settings]
        more = min(len(group["params"]), MAX_CROWD) if sees_places(self._optimizer) else CROWD
        return list(range(2 + more))[::-1]

    def _check_late(self, target: int) -> None:
        """Raise UnsupportedError if a step with this number couples parameters. See [Note: what happens later]."""
        many = self._crowd()
        try:
            crowded, apart = (
                self._take_steps(calls, count=len(many), steps=len(LATE_SCALES), late=target)
                for calls in ([many], [[0], [1]])
            )
        except UnsupportedError:
            raise
        except Exception:  # numbers that no run reaches
            return
        if not _is_alike(crowded, apart):
            raise coupling(self._kind, f"in step {target} or later")

    def _check_large(self, keys: Sequence[StateKey]) -> None:
        """Raise UnsupportedError unless a large tensor's state has the same form. See [Note: large tensors]."""
        shape = LARGE_SHAPES[len(self._shapes[0])]
        forms = {key.name: (key.dtype, key.shape(shape)) for key in keys}
        if sum(math.prod(kept) for _, kept in forms.values()) > MAX_TRIAL_STATE:
            return
        generator = torch.Generator().manual_seed(0x5AFE)
        value, gradient = (_random(shape, self._dtype, generator) for _ in range(2))
        work = self._work(value, gradient, self._initial(shape))
        self._try(OptimizerProxy(copy_for_trial(self._optimizer)), [work])
        for name, kept in work.state.items():
            self._check_kept(name, kept)
            if isinstance(kept, torch.Tensor) and forms.get(name) != (kept.dtype, tuple(kept.shape)):
                raise UnsupportedError(
                    f"{self._kind} cannot be paged: for a parameter of {list(shape)} it keeps {name!r} as {kept.dtype} "
                    f"{list(kept.shape)}, and in another form for a smaller one, as low-bit optimizers do, whose state is not "
                    f"paged: {FEWER_BITS}"
                )

    def _changed_settings(self, after: list[dict[str, Any]]) -> frozenset[str]:
        before = copy_for_trial(self._optimizer).param_groups
        return frozenset(
            key
            for old, new in zip(before, after, strict=True)
            for key in new
            if key != "params" and not is_same(new[key], old.get(key))
        )

    def _may_start_late(self) -> bool:
        try:
            return is_same(self._take_steps([[0, 1]], start=2), self._take_steps([[0], [1]], start=2))
        except UnsupportedError:  # torch's fused SGD with momentum fails there by itself
            return False

    def _take_steps(
        self, calls: list[list[int]], start: int = 0, count: int = 2, steps: int | None = None, late: int | None = None
    ) -> Any:
        """Take the steps, in calls with these tensors; return these with their state, and the optimizer's own changes.

        The second tensor has its first gradient in step `start`. There are `count`, each like the first or the second. If it is
        `late`, counters begin just below that number.
        """
        tensors = [self._values[i % 2].clone() for i in range(count)]
        clone = copy_for_trial(self._optimizer)
        states: list[dict[str, Any]] = [{} for _ in tensors]
        if late is not None:
            states = [self._move_on(clone, i % 2, late) for i in range(count)]
        proxy = OptimizerProxy(clone)
        for step in range(self._steps if steps is None else steps):
            scale = 1.0 if late is None else LATE_SCALES[step]
            for members in [[i for i in call if i != 1 or step >= start] for call in calls]:
                if not members:
                    continue
                for i in members:
                    if step == (start if i == 1 else 0) and late is None:
                        states[i] = self._initial(self._shapes[i % 2])
                works = [self._work(tensors[i], self._gradients[step][i % 2] * scale, states[i]) for i in members]
                self._try(proxy, works)
                self._passed[len(works)] = max(self._passed.get(len(works), 0), proxy.passed)
                for index, work in zip(members, works, strict=True):
                    given = self._gradients[step][index % 2] * scale
                    self._changes_gradient = self._changes_gradient or not is_same(work.gradient, given)
                    tensors[index], states[index] = work.tensor, work.state
                    self._look_at(index % 2, work.state)
            proxy.end_step()
            if not self._is_known and len(self._after) < self._steps and len(calls[0]) == 2 and late is None:
                self._after.append((copy.deepcopy(states), copy_for_trial(clone)))
        own = {name: value for name, value in vars(clone).items() if is_plain(value) or isinstance(value, torch.Tensor)}
        return list(zip(tensors, states, strict=True)), clone.param_groups, own

    def _work(self, tensor: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> Work:
        return Work(self._settings, tensor, gradient.clone(), state, self._marks)

    def _move_on(self, clone: Optimizer, index: int, target: int) -> dict[str, Any]:
        """Advance a clone's counters, and return the advanced state of a tensor. See [Note: what happens later]."""
        (states, before), (later, after) = self._after[-2:]
        for group, old, new in zip(clone.param_groups, before.param_groups, after.param_groups, strict=True):
            group.update({k: advanced(old.get(k), v, target) for k, v in new.items() if k != "params"})
        own = {k: v for k, v in vars(after).items() if k not in ("state", "param_groups") and not k.endswith("_hooks")}
        vars(clone).update({k: advanced(vars(before).get(k), v, target) for k, v in own.items() if is_plain(v)})
        state: dict[str, Any] = advanced(states[index], later[index], target)
        return state

    def _try(self, proxy: OptimizerProxy, works: list[Work]) -> None:
        """Update; begin with existing state if it must exist before the first step (Adagrad makes it in __init__)."""
        kept = [(work.tensor.clone(), dict(work.state)) for work in works]
        try:
            proxy.update(works)
            return
        except UnsupportedError:
            raise
        except Exception as error:
            template = None if any(state for _, state in kept) else self._template
            if template is None:
                raise self._refusal(error) from error
        self._initial = lambda shape: template(shape, self._dtype)
        for work, (tensor, _) in zip(works, kept, strict=True):
            work.tensor, work.state = tensor, self._initial(tuple(tensor.shape))
        try:
            proxy.update(works)
        except Exception as error:
            raise self._refusal(error) from error

    def _refusal(self, error: BaseException) -> UnsupportedError:
        return UnsupportedError(
            f"{self._kind} cannot be paged: a step of it on a tensor of shape {list(self._shapes[0])} and "
            f"{self._dtype}, as in swapper's sweep, failed with {type(error).__name__}: {error}"
            + (". Call its train() before manager.offload, and before each step" if has_modes(self._optimizer) else "")
        )

    def _look_at(self, index: int, state: dict[str, Any]) -> None:
        self._always = set(state) if self._always is None else self._always & set(state)
        for name, value in state.items():
            self._check_kept(name, value)
            if isinstance(value, torch.Tensor):
                self._seen[index].setdefault(name, []).append(value)

    def _check_kept(self, name: str, value: Any) -> None:
        """Raise UnsupportedError for a value in the state that cannot lie in a section or in a commit."""
        if type(value) is not torch.Tensor and not is_plain(value):
            raise UnsupportedError(
                f"{self._kind} cannot be paged: it keeps {name!r} as a {type(value).__name__}; only dense tensors of torch's own "
                "class, alone or in a list, numbers and strings can be kept in a file that plain torch.load reads"
                + (f": {FEWER_BITS}" if isinstance(value, torch.Tensor) else "")
            )

    def _key(self, name: str) -> StateKey:
        one, other = self._seen[0][name], self._seen[1].get(name, [])
        axes = axes_of(one[0].shape, other[0].shape, self._shapes) if other else None
        if (
            axes is None
            or len({(t.dtype, t.shape) for t in one}) > 1
            or any(t.layout is not torch.strided or t.device.type != "cpu" for t in one)
        ):
            raise UnsupportedError(
                f"{self._kind} cannot be paged: it keeps {name!r} in a form that does not follow from the parameter's "
                f"shape and dtype (shape {list(one[-1].shape)}, {one[-1].dtype}, for a parameter of shape {list(self._shapes[0])})"
            )
        is_never_negative = not one[0].dtype.is_complex and not any(bool((t < 0).any()) for t in (*one, *other))
        orders = {order_of(tensor) for tensor in (*one, *other)}
        return StateKey(name, one[0].dtype, axes, is_never_negative, orders.pop() if len(orders) == 1 else ())

    def _may_cut(self, keys: tuple[StateKey, ...], whole: tuple[torch.Tensor, dict[str, Any]]) -> bool:
        """Update flat pieces of the first tensor, and compare the result with the whole one's."""
        numel = self._values[0].numel()
        group = self._optimizer.param_groups[self._settings]
        if numel < 2 or not _may_depend_on_its_elements_only(type(self._optimizer), group, self._dtype):
            return False
        if not self._is_known and not may_be_elementwise(self._optimizer):
            return False
        step = 64 if group.get("fused") else 13
        pieces = [(begin, min(begin + step, numel)) for begin in range(0, numel, step)]
        like = {key.name for key in keys if key.is_like(len(self._shapes[0]))}
        first = self._initial(self._shapes[0])
        parts = [self._values[0].reshape(-1)[begin:end].clone() for begin, end in pieces]
        states = [
            {k: v.reshape(-1)[b:e].clone() if k in like else copy.deepcopy(v) for k, v in first.items()}
            for b, e in pieces
        ]
        proxy = OptimizerProxy(copy_for_trial(self._optimizer))
        try:
            for gradients in self._gradients:
                flat = gradients[0].reshape(-1)
                works = [
                    self._work(part, flat[begin:end], state)
                    for part, state, (begin, end) in zip(parts, states, pieces, strict=True)
                ]
                proxy.update(works)
                parts, states = [work.tensor for work in works], [work.state for work in works]
                proxy.end_step()
        except Exception:  # it needs whole parameters
            return False
        tensor, state = whole
        if not is_same(torch.cat(parts), tensor.reshape(-1)) or any(s.keys() != state.keys() for s in states):
            return False
        return all(
            is_same(torch.cat([s[name] for s in states]), value.reshape(-1))
            if name in like and isinstance(value, torch.Tensor)
            else all(is_same(s[name], value) for s in states)
            for name, value in state.items()
        )


def template_of(optimizer: Optimizer, settings: int) -> Template | None:
    """Return the optimizer's present state for one parameter of a group, as a function of the shape; None: it has none yet."""
    for parameter in optimizer.param_groups[settings]["params"]:
        state = flat(optimizer.state.get(parameter, {}))
        tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
        if state and all(not value.dim() or value.shape == parameter.shape for value in tensors):
            known = {key: _first_of(value) for key, value in state.items()}
            return lambda shape, dtype: {
                key: torch.full(shape, value[0], dtype=dtype, device="cpu")
                if isinstance(value, tuple)
                else copy.deepcopy(value)
                for key, value in known.items()
            }
    return None


def _first_of(value: Any) -> Any:
    """Return the first element of a tensor, in a tuple; a copy of anything else, on the CPU."""
    if isinstance(value, torch.Tensor) and value.dim() and value.numel() and not value.is_meta:
        return (value.reshape(-1)[0].item(),)
    return value.cpu().clone() if isinstance(value, torch.Tensor) and not value.is_meta else copy.deepcopy(value)


def _is_alike(crowded: Any, two: Any) -> bool:
    """Return True if each of many tensors is like the first or the second of two, and the optimizers like each other."""
    pairs = all(is_same(one, two[0][number % 2]) for number, one in enumerate(crowded[0]))
    return pairs and is_same(crowded[1:], two[1:])


def _marks_in(group: Mapping[str, Any], ndim: int) -> dict[str, Any]:
    """Return the attributes that the user has set on parameters of a group."""
    return next((dict(vars(p)) for p in group["params"] if p.dim() == ndim and vars(p)), {})


def steps_of(group: Mapping[str, Any]) -> int:
    """Return how many steps of a trial show all that an optimizer with these settings does: two after the first rare one."""
    rare = [n for key, n in group.items() if type(n) is int and any(word in key for word in RARE)]
    return max([STEPS, *(n + 2 for n in rare if n + 2 <= MAX_STEPS)])


def _may_depend_on_its_elements_only(cls: type[Optimizer], group: dict[str, Any], dtype: torch.dtype) -> bool:
    if dtype not in NARROW:
        return dtype.is_floating_point
    if group.get("fused"):
        return cls in CUT_NARROW_FUSED
    return cls in CUT_NARROW and not (
        cls is Adam and group.get("weight_decay") and not group.get("decoupled_weight_decay")
    )


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    made = torch.complex64 if dtype.is_complex else torch.float32
    return torch.randn(shape, generator=generator, dtype=made, device="cpu").to(dtype)

"""Watched tensors do as ordinary ones do, but for their rules; whatever is done, they stay the same objects."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from swapper.errors import StateError
from swapper.tensors.guarded_tensor import TensorWatch, WatchedTensor, unwatch, watch_of
from swapper.train.gradients.gradient_guards import fix, protect, release, unfix
from swapper.train.state.state_view import ShownState

Values = torch.Tensor


def values() -> Values:
    return torch.arange(6.0).view(2, 3)


class Watching(TensorWatch):
    """Notes what happens."""

    follows_writes = True

    def __init__(self) -> None:
        self.seen: list[str] = []

    def use(self, tensor: torch.Tensor) -> None:
        self.seen.append("use")

    def used(self, tensor: torch.Tensor) -> None:
        self.seen.append("used")

    def write(self, how: str) -> None:
        self.seen.append(f"write {how}")

    def wrote(self, how: str) -> None:
        self.seen.append(f"wrote {how}")


def test_each_access_is_told_in_its_order() -> None:
    watch = Watching()
    tensor = watch.watch(values())
    assert (tensor.shape, tensor.dtype, tensor.numel(), tensor.requires_grad) == ((2, 3), torch.float32, 6, False)
    assert watch.seen == [], "properties need no data"
    assert tensor.sum() == 15 and watch.seen == ["use", "used"]
    watch.seen.clear()
    tensor[0].add_(1)
    assert watch.seen == ["use", "used", "use", "write add_", "used", "wrote add_"]
    watch.seen.clear()
    torch.add(values(), 1, out=tensor)
    assert watch.seen == ["use", "write add", "used", "wrote add"]
    unwatch(tensor)
    assert type(tensor) is torch.Tensor and watch_of(tensor) is None and not vars(tensor)


@pytest.mark.parametrize(
    "view", [lambda t: t[0], lambda t: t.t(), lambda t: t.view(-1).split(2)[1], lambda t: t.detach()]
)
def test_results_that_share_memory_are_watched_and_others_are_not(view: Callable[[Values], Values]) -> None:
    watch = Watching()
    tensor = watch.watch(values())
    assert watch_of(view(tensor)) is watch
    assert type(view(tensor) + 0) is type(tensor.clone()) is type(tensor.sum()) is torch.Tensor


def test_what_is_mapped_gives_arrays_of_their_own_and_others_share() -> None:
    for is_mapped, locks in ((True, True), (True, False), (False, True)):
        watch = Watching()
        watch.is_mapped, watch.locks_arrays = is_mapped, locks
        tensor = watch.watch(values())
        array = tensor.numpy()
        assert array.flags.writeable is not locks
        tensor.add_(1)
        assert bool(array[0, 0] == 0) is is_mapped


def test_copies_and_pickles_are_ordinary_and_texts_are_torchs() -> None:
    tensor = Watching().watch(values())
    for made in (copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor)), copy.deepcopy([tensor, tensor])[1]):
        assert type(made) is torch.Tensor and torch.equal(made, values())
    one, other = copy.deepcopy([tensor, tensor])
    assert one is other
    assert repr(tensor) == repr(values())


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t + 1,
        lambda t: t.add_(1),
        repr,
        copy.deepcopy,
        pickle.dumps,
        lambda t: t.numpy(),
        lambda t: torch.stack([t, t]),
    ],
)
def test_a_use_of_one_fixed_gradient_may_end_the_watch_of_all(use: Callable[[Any], Any]) -> None:
    gradients = [values(), values()]
    finished: list[int] = []

    def finish() -> None:
        finished.append(1)
        unfix(gradients)

    fix(gradients, finish)
    assert gradients[0].shape == (2, 3) and not finished
    use(gradients[0])
    assert finished == [1] and [type(gradient) for gradient in gradients] == [torch.Tensor] * 2
    fix(gradients, finish)
    torch.add(*gradients)
    assert finished == [1, 1]


def test_a_used_gradient_can_be_read_until_it_is_released_with_its_views() -> None:
    gradient = values()
    protect(gradient, "w")
    view = gradient[1]
    for write in (
        lambda: gradient.add_(1),
        lambda: view.zero_(),
        lambda: gradient.mul_(0.5),
        lambda: gradient.view(-1)[0].fill_(1),
    ):
        with pytest.raises(StateError, match="would change the gradient of w, which was used in backward already"):
            write()
    version = gradient._version
    assert gradient.mul_(1.0) is gradient and gradient.mul_(torch.ones(())) is gradient and gradient._version == version
    assert not gradient.numpy().flags.writeable
    release(gradient)
    assert type(gradient) is torch.Tensor
    view.zero_()
    assert type(view) is torch.Tensor and gradient[1].sum() == 0


def test_a_write_to_shown_state_or_to_a_view_is_written_back() -> None:
    written: list[tuple[float, str]] = []
    shown = ShownState(values(), lambda memory, how: written.append((memory.sum().item(), how)))
    tensor = shown.tensor()
    assert tensor is shown.tensor() and type(tensor) is WatchedTensor
    tensor[0].add_(1)
    tensor.data.mul_(2)
    assert written == [(18.0, "add_"), (36.0, "mul_")]
    assert tensor.sum() == 36 and len(written) == 2
    assert repr(tensor[0]) == repr(torch.tensor([2.0, 4.0, 6.0]))

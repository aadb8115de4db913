"""Guards the gradients of updates that are open, and finds out whether somebody has changed them all the same.

A gradient that a step will still use is a FixedGradient: an operation that needs or changes its data finishes the step
first. One that a backward has used is a UsedGradient until the step is taken: it can be read and not changed. Writes past
both increase the gradient's version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from swapper.errors import StateError
from swapper.tensors.guarded_tensor import Function, TensorWatch, unwatch, watch_of
from swapper.tensors.torch_private import without_torch_functions
from swapper.train.layout.slices import GroupUpdate, Trainable


class FixedGradient(TensorWatch):
    """Watches a gradient that a step will still use.

    Args:
        finish: has the step use it, and calls `unfix`.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def use(self, tensor: torch.Tensor) -> None:
        self._finish()


def fix(gradients: Iterable[torch.Tensor], finish: Callable[[], None]) -> None:
    """Have operations on those of `gradients` that are ordinary tensors call `finish` first."""
    watch = FixedGradient(finish)
    for gradient in gradients:
        if type(gradient) is torch.Tensor:
            watch.watch(gradient)


def unfix(gradients: Iterable[torch.Tensor]) -> None:
    """Make those of `gradients` that were fixed ordinary tensors again."""
    for gradient in gradients:
        if isinstance(watch_of(gradient), FixedGradient):
            unwatch(gradient)


ADVICE = (
    "to clip or scale gradients, offload with update='step' or update='deferred'; what needs one gradient alone (clipping its "
    "values) can be done in a hook, parameter.register_post_accumulate_grad_hook, which runs before the update"
)


class UsedGradient(TensorWatch):
    """Watches the gradient of parameter `name`, which an update has used while the user may still try to change it.

    Until `step()` it can be read, and an operation that would write to it, or to a view of it, raises an error; arrays
    are read-only. `step()` detects other writes by the gradient's version.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.is_over = False

    def use(self, tensor: torch.Tensor) -> None:
        if self.is_over:  # a view that somebody has kept
            unwatch(tensor)

    def changes_nothing(self, func: Function, args: Sequence[object]) -> bool:
        factor = args[1] if func is torch.Tensor.mul_ else None  # torch's clip_grad_norm_, if it clips nothing
        is_number = isinstance(factor, int | float) or (type(factor) is torch.Tensor and factor.dim() == 0)
        return is_number and bool(factor == 1)

    def write(self, how: str) -> None:
        raise StateError(
            f"{how} would change the gradient of {self._name}, which was used in backward already: with update='backward' "
            f"gradients cannot be changed before optimizer.step(); {ADVICE}"
        )


def protect(gradient: torch.Tensor, name: str) -> None:
    """Make `gradient`, that of the parameter `name`, read-only from now on."""
    if type(gradient) is torch.Tensor:
        UsedGradient(name).watch(gradient)


def release(gradient: torch.Tensor) -> None:
    """Make `gradient` an ordinary tensor again."""
    watch = watch_of(gradient)
    if isinstance(watch, UsedGradient):
        watch.is_over = True
        unwatch(gradient)


class GradientGuards:
    """Owns the guards of the open updates' gradients."""

    def __init__(self) -> None:
        self._versions: dict[int, int] = {}  # by id of the gradient
        self._protected: list[tuple[int, torch.Tensor]] = []  # with the group of the OptimizerSet

    def fix(self, update: GroupUpdate, finish: Callable[[], None]) -> None:
        """Have operations on the update's gradients, as they are now, call `finish` first."""
        self.note(update)
        fix(update.present, finish)

    def note(self, update: GroupUpdate) -> None:
        """Note the update's gradients as they are now."""
        for gradient in update.present:
            self._versions[id(gradient)] = gradient._version

    def release(self, update: GroupUpdate) -> None:
        """Turn the update's gradients into ordinary tensors before their use.

        Raises:
            StateError: somebody has changed one.
        """
        unfix(update.present)
        for gradient, places in zip(update.gradients, update.trainable.places, strict=True):
            if gradient is not None and self._is_changed(gradient):
                raise StateError(
                    f"the gradient of {places.name} was changed after optimizer.step() by way of an alias of it, and with "
                    "update='deferred' that step was still to use it: change gradients by `parameter.grad`, or offload with "
                    "update='step'"
                )

    def protect(self, trainables: Iterable[Trainable]) -> None:
        """Make all gradients of these parameters read-only: a backward has used some of them."""
        for trainable in trainables:
            for parameter, places, settings in trainable.members:
                with without_torch_functions():  # many are cold, and their data is not needed
                    gradient = parameter.grad
                if gradient is not None:
                    protect(gradient, places.name)
                    self._protected.append((settings, gradient))

    def unprotect(self, groups: range) -> None:
        """Make the gradients in these groups of the optimizers writable again."""
        protected, self._protected = self._protected, []
        for settings, gradient in protected:
            if settings in groups:
                release(gradient)
            else:
                self._protected.append((settings, gradient))

    def changed(self, updates: Iterable[GroupUpdate], groups: range) -> Iterator[str]:
        """Yield the gradients in these groups of the optimizers that are not as they were noted, in words."""
        for update in updates:
            for (parameter, places, settings), gradient in zip(update.trainable.members, update.gradients, strict=True):
                if settings not in groups:
                    continue
                with without_torch_functions():  # as in `protect`
                    is_other = parameter.grad is not gradient
                if is_other or (gradient is not None and self._is_changed(gradient)):
                    yield f"the gradient of {places.name}"

    def clear(self, updates: Iterable[GroupUpdate] = ()) -> None:
        """Guard nothing any more; `updates` are those that are still open."""
        for update in updates:
            unfix(update.present)
        for _, gradient in self._protected:
            release(gradient)
        self._versions, self._protected = {}, []

    def _is_changed(self, gradient: torch.Tensor) -> bool:
        return gradient._version != self._versions[id(gradient)]

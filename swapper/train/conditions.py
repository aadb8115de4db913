"""What must hold of gradients and settings so that a step, taken slice by slice, gives what plain torch gives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from swapper.errors import StateError, UnsupportedError
from swapper.train.discovery import StateForm
from swapper.train.entries import StateEntries
from swapper.train.inventory import Inventory, updated_dtype
from swapper.train.slices import ParameterPlaces
from swapper.train.sweep import Trainable


class Conditions:
    """Looks at gradients and settings before anything of a step is done.

    Args:
        inventory: what the model and the optimizer consist of.
        trainables: what is trained.
        entries: what the optimizer keeps for each parameter.
    """

    def __init__(self, inventory: Inventory, trainables: Sequence[Trainable], entries: StateEntries) -> None:
        self._inventory = inventory
        self._entries = entries
        self._kinds: dict[tuple[int, torch.dtype, int], StateForm] = {}
        self._of_kind: dict[tuple[int, torch.dtype], list[tuple[nn.Parameter, ParameterPlaces]]] = {}
        for trainable in trainables:
            for parameter, places, settings in zip(
                trainable.parameters, trainable.places, trainable.settings, strict=True
            ):
                dtype = updated_dtype(parameter, inventory.master_dtype)
                self._kinds[settings, dtype, parameter.dim()] = inventory.forms[places.name]
                self._of_kind.setdefault((settings, dtype), []).append((parameter, places))
        self._starts_together = {(s, dtype) for (s, dtype, _), form in self._kinds.items() if form.starts_together}

    def check_step(self) -> None:
        """Raise StateError if the optimizer would do something else to a slice than to all parameters at one time.

        Its settings were changed so that it would keep other state, or need whole parameters; or a parameter has its first
        gradient where they must have it together.
        """
        self.check_settings()
        for kind in self._starts_together:
            active = [places.name for parameter, places in self._of_kind[kind] if parameter.grad is not None]
            new = [name for name in active if not self._entries[name]]
            if new and len(new) < len(active):
                raise StateError(
                    f"parameter {new[0]} has its first gradient later than others, and with these settings the optimizer rounds "
                    "differently in such a step: build it with foreach=False"
                )

    def check_settings(self) -> None:
        """The part of `check_step` that needs no gradients."""
        for (settings, dtype, ndim), form in self._kinds.items():
            now = self._inventory.discovery.form(settings, dtype, ndim)
            if now is not form and (set(now.keys) - set(form.keys) or (form.may_cut and not now.may_cut)):
                raise StateError(
                    f"the settings of the optimizer's group {settings} were changed so that it keeps other state "
                    f"({sorted(key.name for key in now.keys)} instead of {sorted(key.name for key in form.keys)}) or may not "
                    "update parameters in pieces any more: set them before manager.offload"
                )

    @property
    def all_gradients_matter(self) -> bool:
        """Whether no parameter may be updated before it is known which ones have a gradient in this step."""
        return any(
            not self._entries[places.name] for kind in self._starts_together for _, places in self._of_kind[kind]
        )


def check_update(update: str, model: nn.Module, forms: Iterable[StateForm], optimizer: str) -> None:
    """Raise UnsupportedError if updates at this time cannot be exact.

    Args:
        update: "step", "deferred" or "backward".
        model: to be offloaded.
        forms: what its optimizer keeps.
        optimizer: its kind, for people.
    """
    names = sorted({name for form in forms for name in form.sets})
    if update == "deferred" and names:
        raise UnsupportedError(
            f"{optimizer} changes its own settings ({', '.join(names)}) in a step, which update='deferred' would show only when "
            "the next forward is over: offload with update='step'"
        )
    if update == "backward" and any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise UnsupportedError(
            "DistributedDataParallel averages gradients over processes while backward goes on, and update='backward' would use "
            "them before that: offload with update='step' or update='deferred'"
        )

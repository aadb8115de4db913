"""What a loaded model refuses at once, rather than letting it go wrong later: to be moved or converted, trained, or copied.

Methods of each module are replaced on the instance for as long as the model is loaded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from swapper.errors import StateError
from swapper.modules.torch_functions import changes_nothing

REFUSED = ("_apply", "train", "__reduce_ex__")


def refuse_changes(module: nn.Module, name: str) -> None:
    """Have `module`, which people know as `name`, refuse until `allow_changes`."""
    module.__dict__["_apply"] = _refuse_to_move(weakref.ref(module), name)
    module.__dict__["train"] = _refuse_to_train(weakref.ref(module), name)
    module.__dict__["__reduce_ex__"] = _refuse_to_copy  # pickle and copy look at the instance


def _refuse_to_copy(protocol: Any) -> Any:
    raise StateError(
        "a model that was loaded by swapper.load cannot be copied or pickled, its weights stay in the checkpoint's files: load "
        "it once more, or copy or save model.state_dict()"
    )


def allow_changes(module: nn.Module) -> None:
    for method in REFUSED:
        module.__dict__.pop(method, None)


def _refuse_to_move(of: weakref.ref[nn.Module], name: str) -> Callable[..., nn.Module]:
    """Return what takes the place of `Module._apply`: what would change nothing is done, the rest refused."""

    def refuse(convert: Callable[[torch.Tensor], Any], recurse: bool = True) -> nn.Module:
        module = of()
        tensors = [] if module is None else [*module.parameters(recurse), *module.buffers(recurse)]
        if module is not None and all(changes_nothing(convert, tensor) for tensor in tensors):
            return module
        raise StateError(
            f"{name} was loaded by swapper.load and cannot be moved or converted (.to, .half, .cuda, ...): its weights stay in "
            "the checkpoint's files. Say dtype= and device= when loading"
        )

    return refuse


def _refuse_to_train(of: weakref.ref[nn.Module], name: str) -> Callable[..., nn.Module]:
    """Return what takes the place of `Module.train`. `eval` is `train(False)`, which is as ever."""

    def train(mode: bool = True) -> nn.Module:
        module = of()
        if mode or module is None:
            raise StateError(
                f"{name} was loaded for inference and cannot be trained: its weights are read from the checkpoint and never "
                "written. Build the model in memory and use swapper.SwapManager; or, for dropout without training, set "
                "`training` of the modules that have it"
            )
        return type(module).train(module, False)

    return train

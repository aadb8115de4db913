"""Decides which tensors of the optimizer's state are stored encoded, and by which codec. Pure.

[Note: what is encoded] A tensor of the parameter's shape, of a parameter with at least two dimensions and CODED_NUMEL
elements, whose rows have a multiple of 32 elements. Norms, biases, counters and factors stay exact. Codecs count groups
of 32 by the parameter's flat index, and slices, runs and pieces begin at multiples of 32: so results do not depend on
budgets, slices, shards by rows or threads. What is encoded is the state: it is encoded after each update, wherever it is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from swapper.codecs import CODECS, GROUP, StateCodec
from swapper.errors import ConfigError, UnsupportedError
from swapper.paging.layout import TensorSpec
from swapper.train.optimizer.entries import StateForm, StateKey

log = logging.getLogger("swapper")

CODED_NUMEL = 4096
"""Elements: smaller tensors stay exact, as in bitsandbytes and torchao."""

MASTER = "master"
"""The kind of an fp32 master."""
EXACT = "exact"
FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")
MEANS = ("grad_avg",)
"""Keys whose square an optimizer subtracts from a second moment: that stays exact then, as rounding could make it negative."""

PRESETS: dict[str, dict[str, str]] = {
    EXACT: {},
    "split": {MASTER: "split"},
    "bf16": {MASTER: "split", **dict.fromkeys((*FIRST_MOMENTS, *SECOND_MOMENTS), "bf16")},
    "8bit": {
        MASTER: "master24",
        **dict.fromkeys(FIRST_MOMENTS, "moment8"),
        **dict.fromkeys(SECOND_MOMENTS, "variance8"),
    },
}
MAX_BETA2 = 0.99
"""With which second moments in bf16 still fall as gradients shrink: measured, docs/reference/codecs.md."""
OF_MASTERS = ("split", "master24")
OF_STATE = ("bf16", "moment8", "variance8")
"""Codecs by what they hold."""


@dataclass(frozen=True)
class StateCodecs:
    """The user's choice: `state_codec=` of `manager.offload`.

    Attributes:
        of_key: name of the codec by key of the state, "master" for fp32 masters.
        is_preset: keys that the optimizer does not keep, or keeps in another form, stay exact; else they are refused.
        said: the user's words, for errors.
    """

    of_key: Mapping[str, str]
    is_preset: bool = True
    said: str = "state_codec='exact'"

    @classmethod
    def parse(cls, choice: str | Mapping[str, str], master_weights: torch.dtype | None) -> StateCodecs:
        """Check the option.

        Raises:
            ConfigError: a codec is unknown, or is not one for that key; masters are to be encoded, and there are none.
        """
        said = f"state_codec={choice!r}"
        if isinstance(choice, str):
            if choice not in PRESETS:
                raise ConfigError(f"{said} is not known: use one of {_named(PRESETS)}, or a map from key to codec")
            found = cls(PRESETS[choice], True, said)
        elif isinstance(choice, Mapping):
            for key, codec in choice.items():
                allowed = (EXACT, *(OF_MASTERS if key == MASTER else OF_STATE))
                if codec not in allowed:
                    raise ConfigError(f"{said}: {codec!r} is not known for {key!r}: use one of {_named(allowed)}")
            found = cls({key: codec for key, codec in choice.items() if codec != EXACT}, False, said)
        else:
            raise ConfigError(f"{said} is not known: give a name, one of {_named(PRESETS)}, or a map")
        needs_masters = MASTER in found.of_key and (not found.is_preset or len(found.of_key) == 1)
        if needs_masters and master_weights is None:
            raise ConfigError(
                f"{said} encodes fp32 masters, and there are none: give a bf16 model and master_weights=torch.float32"
            )
        return found

    def of(
        self, name: str, parameter: nn.Parameter, updated: torch.dtype, form: StateForm, shape: torch.Size
    ) -> dict[str, StateCodec]:
        """Return the codecs of one parameter's state, by key. [Note: what is encoded]

        Args:
            name: the parameter's.
            updated: dtype of the tensor that the optimizer updates: the master's, if there is one.
            form: of its state.
            shape: of the parameter; of a shard, that of the whole, so that ranks agree. A shard without rows has no codes.

        Raises:
            UnsupportedError: a tensor has a form that its codec cannot hold.
        """
        if not self.of_key or not _is_large(shape) or not parameter.numel():
            return {}
        found: dict[str, StateCodec] = {}
        if updated != parameter.dtype and MASTER in self.of_key:
            if parameter.dtype != torch.bfloat16:
                raise UnsupportedError(
                    f"{self.said}: the codec {self.of_key[MASTER]!r} holds masters of bf16 parameters, and {name} is "
                    f"{_short(parameter.dtype)}: use bf16, or leave state_codec out"
                )
            found[MASTER] = CODECS[self.of_key[MASTER]]
        for key in form.keys:
            codec = self.of_key.get(key.name)
            if codec is not None and self._can_hold(codec, name, key, form, len(shape)):
                found[key.name] = CODECS[codec]
        return found

    def _can_hold(self, codec: str, name: str, key: StateKey, form: StateForm, ndim: int) -> bool:
        is_like, is_fp32 = key.is_like(ndim), key.dtype == torch.float32
        is_signed = codec == "variance8" and not key.is_never_negative
        is_used_with_a_mean = key.name in SECOND_MOMENTS and any(form.find(mean) is not None for mean in MEANS)
        if is_like and key.dtype in (torch.bfloat16, torch.float16):
            raise UnsupportedError(
                f"{self.said}: the codec {codec!r} holds fp32, and {key.name!r} of {name} is {_short(key.dtype)}: pass "
                "master_weights=torch.float32, with which the state is fp32, or leave state_codec out"
            )
        if is_like and is_fp32 and not is_signed and not is_used_with_a_mean:
            return True
        if self.is_preset:
            return False
        why = (
            "has another shape than the parameter"
            if not is_like
            else f"is {_short(key.dtype)}"
            if not is_fp32
            else "can be negative"
            if is_signed
            else "is used with a mean whose square is subtracted from it"
        )
        raise UnsupportedError(f"{self.said}: the codec {codec!r} cannot hold {key.name!r} of {name}, which {why}")

    def warn_of_stalls(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Warn if second moments in bf16 would not fall: docs/reference/codecs.md, second moments that change slowly."""
        keys = [key for key in SECOND_MOMENTS if self.of_key.get(key) == "bf16"]
        beta2 = max((float(group["betas"][1]) for group in groups if "betas" in group), default=0.0)
        if keys and beta2 > MAX_BETA2:
            log.warning(
                "%s: second moments in bf16 do not fall with beta2=%g, so updates become too small as gradients shrink: use a "
                "beta2 of at most %g, or state_codec={'master': 'split', 'exp_avg': 'bf16', 'exp_avg_sq': 'variance8'}",
                self.said, beta2, MAX_BETA2,
            )  # fmt: skip

    def check_keys(self, forms: Collection[StateForm], kind: str) -> None:
        """Raise UnsupportedError if a key of the user's map is none of the optimizer's."""
        known = {MASTER, *(key.name for form in forms for key in form.keys)}
        for key in self.of_key if not self.is_preset and forms else ():
            if key not in known:
                raise UnsupportedError(
                    f"{self.said}: {kind} keeps no {key!r}; it keeps {_named(sorted(known - {MASTER}))}"
                )


def coded_specs(name: str, key: str, codec: StateCodec, shape: tuple[int, ...]) -> list[TensorSpec]:
    """Return the parts of an encoded tensor. A part with as many elements has the parameter's shape; others have its rows."""
    rows, numel = shape[0], math.prod(shape)
    return [
        TensorSpec(name, coded_kind(key, codec.name, suffix), dtype, shape if n == numel else (rows, n // rows))
        for suffix, dtype, n in codec.parts(numel)
    ]


def coded_kind(key: str, codec: str, suffix: str) -> str:
    """Return the kind of a part of an encoded tensor: layouts of different codecs differ in it."""
    return f"{key}:{codec}:{suffix}"


def _is_large(shape: torch.Size) -> bool:
    return len(shape) >= 2 and shape.numel() >= CODED_NUMEL and shape.numel() // shape[0] % GROUP == 0


def _named(names: Collection[str]) -> str:
    return ", ".join(map(repr, names))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Updates encoded state of torch.optim.AdamW in one pass: decode, AdamW, encode (swapper/codecs/coded_adamw.py).

It is used where both moments are stored rounded, masters encoded too ("8bit" and "bf16"), and the optimizer is torch's
own AdamW without amsgrad. Its order of operations is not torch's: results differ from codecs around torch's AdamW in the
last bits of fp32, far below what rounding the moments changes. Where moments are exact ("split") it is not used. Whether
it is follows from the optimizer and the codecs alone, so results do not depend on placements and budgets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from swapper.codecs import CodedState, adamw_
from swapper.device.kernels.adamw import AdamWStep
from swapper.errors import StateError
from swapper.train.layout.slices import ParameterLocations

ADAMW = "torch.optim.adamw.AdamW"
MOMENTS = {"exp_avg", "exp_avg_sq"}
"""Keys of the state, whose codecs all round."""


def is_fused(kind: str, settings: Mapping[str, Any], places: ParameterLocations) -> bool:
    """Return True if one pass updates a parameter.

    Args:
        kind: the optimizer's class.
        settings: of the parameter's group.
    """
    wanted = {*MOMENTS, "master"} if places.has_master else MOMENTS
    is_plain = settings.get("decoupled_weight_decay", True) and not settings.get("amsgrad")
    return kind == ADAMW and places.coded.keys() == wanted and bool(is_plain)


def update(
    places: ParameterLocations,
    parts: Mapping[str, Sequence[torch.Tensor]],
    param: torch.Tensor,
    gradient: torch.Tensor,
    step: int,
    settings: Mapping[str, Any],
) -> None:
    """Update elements of a parameter and its state.

    Args:
        parts: of the encoded state, by key.
        param, gradient: flat.
        step: counts from 1.
        settings: of the parameter's group.

    Raises:
        StateError: the codecs cannot hold the result.
    """
    coded = {key: CodedState(places.coded[key].codec, tuple(tensors)) for key, tensors in parts.items()}
    beta1, beta2 = settings["betas"]
    numbers = AdamWStep(
        step,
        float(settings["lr"]),
        (float(beta1), float(beta2)),
        float(settings["eps"]),
        float(settings["weight_decay"]),
    )
    lost = adamw_(
        param,
        gradient.contiguous(),
        coded.get("master"),
        coded["exp_avg"],
        coded["exp_avg_sq"],
        numbers,
        factor=-1.0 if settings.get("maximize") else 1.0,
        threads=torch.get_num_threads(),
    )
    if lost:
        names = ", ".join(repr(coded.codec.name) for coded in places.coded.values())
        raise StateError(
            f"the new state of {places.name} has {lost} values that its codecs ({names}) cannot hold: they are not finite. Look "
            "for an infinite or NaN gradient (clip it, or skip the step)"
        )

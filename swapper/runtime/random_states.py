"""Reads and sets the states of the random number generators of Python, torch, numpy and devices."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def rng_states(devices: bool = True) -> dict[str, object]:
    """Return the states, those of devices too, in a form that torch.load(weights_only=True) reads."""
    states: dict[str, object] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if devices and torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, gauss = sys.modules["numpy"].random.get_state()
        states["numpy"] = (name, [int(key) for key in keys], int(position), int(has_gauss), float(gauss))
    return states


def set_rng_states(states: dict[str, Any]) -> None:
    """Set the generators to `states`, from `rng_states`, except those of missing devices."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)
    if "numpy" in states:
        import numpy

        name, keys, position, has_gauss, gauss = states["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss))

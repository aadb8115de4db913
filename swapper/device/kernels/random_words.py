"""Random words by number, for stochastic rounding: Philox 4x32 with 10 rounds, in plain torch.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011). Word i of a step depends on the seed, the step
and i alone, so it does not matter how a tensor is cut into slices, nor where they are. Triton has the same generator.
"""

from __future__ import annotations

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def random_words(seed: int, step: int, first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return words first to first + count, from 0 to 2**32 - 1, as int64; `first` is a multiple of 4.

    Four words come from one counter: (i // 4, 0 to 63), step, 0.
    """
    counters = torch.arange(first // 4, (first + count + 3) // 4, dtype=torch.int64, device=device)
    zero = torch.zeros_like(counters)
    words = philox(seed, counters & _WORD, counters >> 32, zero + step, zero)
    return torch.stack(words, dim=1).flatten()[:count]


def philox(
    seed: int, c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ten rounds over four counters of 32 bits, each as int64, under a key of 64 bits."""
    k0, k1 = seed & _WORD, seed >> 32 & _WORD
    for _ in range(10):
        high0, low0 = _product(_MULTIPLIERS[0], c0)
        high2, low2 = _product(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _product(factor: int, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low word of 64; by halves, since int64 has no room for the whole."""
    low_part = factor * (words & 0xFFFF)
    high_part = factor * (words >> 16) + (low_part >> 16)
    return high_part >> 16, (high_part << 16 | low_part & 0xFFFF) & _WORD

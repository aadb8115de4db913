"""Reads real text that every machine has: the source of Python's own standard library, as bytes.

A model of it needs no download. Files come in the order of their paths and batches from a seed and their number, so
that a run, and its continuation in another process, see the same data. Does not import swapper (see gpt.py).
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import torch

VALIDATION_EVERY = 16  # one file in this many is held out
LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "__pycache__"}


class Corpus:
    """The text as token ids, cut into training and validation by whole files.

    Args:
        vocabulary: 256 gives one token a byte; more gives one token a pair of bytes, folded into the vocabulary.
        limit_bytes: maximum bytes of text.
    """

    def __init__(self, vocabulary: int = 256, limit_bytes: int = 4_000_000) -> None:
        if vocabulary < 256:
            raise ValueError(f"a vocabulary of {vocabulary} is too small for bytes; it must be at least 256")
        parts: dict[bool, list[bytes]] = {False: [], True: []}
        taken_bytes = 0
        for number, path in enumerate(_sources()):
            text = path.read_bytes()
            parts[number % VALIDATION_EVERY == 1].append(text)
            taken_bytes += len(text)
            if taken_bytes >= limit_bytes and parts[True]:
                break
        self.train = _tokens(b"".join(parts[False]), vocabulary)
        self.validation = _tokens(b"".join(parts[True]), vocabulary)

    def batch(
        self, number: int, size: int, context: int, *, validation: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return batch `number`, the same each time: tokens and targets, int64, each (size, context).

        Args:
            number: of the batch.
            size, context: of the result.
            validation: of the text that is kept for it. Default: False.
        """
        tokens = self.validation if validation else self.train
        generator = torch.Generator().manual_seed(number)
        starts = torch.randint(len(tokens) - context - 1, (size,), generator=generator, device="cpu").tolist()
        rows = torch.stack([tokens[start : start + context + 1] for start in starts]).long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _sources() -> list[Path]:
    library = Path(sysconfig.get_paths()["stdlib"])
    found: list[Path] = []
    for directory, below, files in os.walk(library):
        below[:] = [name for name in below if name not in LEFT_OUT]  # site-packages has more files than all the rest
        found += [Path(directory, name) for name in files if name.endswith(".py")]
    if not found:
        raise FileNotFoundError(f"{library} holds no Python sources to train on")
    return sorted(found)


def _tokens(text: bytes, vocabulary: int) -> torch.Tensor:
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    if vocabulary > 256:
        pairs = tokens[: len(tokens) // 2 * 2].view(-1, 2).int()
        tokens = ((pairs[:, 0] * 256 + pairs[:, 1]) % vocabulary).to(torch.uint16)
    return tokens

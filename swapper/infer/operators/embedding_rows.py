"""Looks up rows of an embedding in the file: a pass uses a few rows of a table of 32,000, and need not read the others.

The module's `forward` is replaced on the instance while the model is loaded; the table itself stays cold, unless
another module (a tied output projection) uses it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from swapper.errors import DeviceError
from swapper.formats.stored import StoredTensor
from swapper.infer.mapping.matching import Recipe
from swapper.io.waiting import wait_for_all
from swapper.modules.own_hook import not_traced

ReadInto = Callable[[StoredTensor, int, torch.Tensor], Any]
"""Submits a read of a stored tensor: (tensor, offset in it, contiguous memory to fill); returns the ticket."""


def can_look_up(module: nn.Module, recipe: Recipe) -> bool:
    """Return True if `module` is an embedding whose rows can be read one by one, and nothing more."""
    return type(module) is nn.Embedding and module.max_norm is None and recipe.rows(0, 1) is not None


def look_up_by_rows(module: nn.Embedding, recipe: Recipe, read: ReadInto, device: torch.device) -> None:
    """Make `module` read the requested rows, until `stop_looking_up`. They are put on `device`."""
    row_count = module.num_embeddings

    @not_traced
    def forward(ids: torch.Tensor) -> torch.Tensor:
        check_place(ids, device)
        with torch.no_grad():
            unique, places = torch.unique(ids, return_inverse=True)
            rows = unique.tolist()
            if rows and not 0 <= rows[0] <= rows[-1] < row_count:
                raise IndexError(f"index out of range: {rows[0]} to {rows[-1]} in an embedding of {row_count} rows")
            tables, tickets = [], []
            for stored in recipe.parts:
                table = torch.empty((len(rows), *stored.shape[1:]), dtype=stored.dtype)
                row_bytes = stored.nbytes // row_count
                tickets += [
                    read(stored, begin * row_bytes, table[number : number + count])
                    for number, begin, count in _stretches(rows)
                ]
                tables.append(table)
            wait_for_all(tickets)
            return F.embedding(places, recipe.from_parts([table.to(device) for table in tables]))

    module.__dict__["forward"] = forward


def check_place(tensor: torch.Tensor, device: torch.device) -> None:
    """Refuse an input on another device than the model's."""
    if tensor.device != device:
        raise DeviceError(
            f"an input is on {tensor.device}, and the model was loaded with device={str(device)!r}: move it there"
        )


def stop_looking_up(module: nn.Module) -> None:
    if getattr(module.__dict__.get("forward"), "__module__", "") == __name__:
        del module.__dict__["forward"]


def _stretches(rows: list[int]) -> list[tuple[int, int, int]]:
    """Return (position in `rows`, first row, number of rows) of each run of neighbors; `rows` ascend."""
    found: list[tuple[int, int, int]] = []
    for number, row in enumerate(rows):
        if found and row == found[-1][1] + found[-1][2]:
            found[-1] = (found[-1][0], found[-1][1], found[-1][2] + 1)
        else:
            found.append((number, row, 1))
    return found

"""`swapper inspect`: what is in a checkpoint, without loading it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from swapper.cli.failing import reported
from swapper.runtime.sizes import format_bytes


def inspect(
    path: Annotated[
        Path, typer.Argument(help="A file, or a directory of Hugging Face or torch.distributed.checkpoint.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the tensors of a checkpoint: shapes, dtypes, places, alignment, step, checksums.

    Reads any file of torch.save (swapper's snapshots too), safetensors, Hugging Face directories and directories of
    torch.distributed.checkpoint. Nothing that a file says is run.
    """
    with reported():
        from swapper.checkpoint.inspecting import inspect as look

        found = look(path)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    _show(found)


def _show(found: dict[str, Any]) -> None:
    console = Console()
    checksums = any("crc32" in tensor for tensor in found["tensors"])
    columns = (
        "tensor",
        "dtype",
        "shape",
        "bytes",
        "offset",
        "aligned to",
        *(("record's CRC-32",) if checksums else ()),
    )
    table = Table()
    for column in columns:
        table.add_column(column, justify="left" if column in ("tensor", "dtype", "shape") else "right", overflow="fold")
    files = {tensor["file"] for tensor in found["tensors"]}
    for tensor in found["tensors"]:
        shape = " x ".join(map(str, tensor["shape"])) or "scalar"
        shape += f" strides {tuple(tensor['stride'])}" if tensor["stride"] else ""
        place = f"{tensor['offset']:,}" + (f" of {tensor['file']}" if len(files) > 1 else "")
        row = [tensor["name"], tensor["dtype"], shape, f"{tensor['bytes']:,}", place, str(tensor["alignment"])]
        table.add_row(*(escape(cell) for cell in row), *([tensor["crc32"]] if checksums else []))
    console.print(table)
    step = f", step {found['step']}" if found["step"] is not None else ""
    size = format_bytes(found["tensor_bytes"])
    console.print(
        f"{escape(found['path'])}: {found['kind']}, {len(found['tensors'])} tensors in {len(files)} files, {size}{step}",
        highlight=False,
        soft_wrap=True,
    )
    for name, value in found["metadata"].items():
        console.print(escape(f"{name}: {value}"), highlight=False, soft_wrap=True)

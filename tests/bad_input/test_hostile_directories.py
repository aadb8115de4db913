"""Directories with something else under the name of each of their files: commands end, soon and in little memory, by our errors."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fuzz.originals import MAKERS

from swapper.checkpoint.exporting import export
from swapper.checkpoint.inspecting import inspect
from swapper.cli.runs import find_runs, remove_leftovers
from swapper.durability.verify import verify
from swapper.errors import SwapperError
from swapper.runtime.free_memory import peak_resident_bytes

MAX_GROWTH_BYTES = 192 << 20


def bind(path: Path) -> None:
    """Make a socket, whose path may be longer than an address."""
    directory = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{directory}/{path.name}")
    os.close(directory)


def lengthen(path: Path, nbytes: int) -> None:
    """Give the file a hole at its end: nothing on the drive."""
    os.truncate(path, nbytes)


PUT: dict[str, Callable[[Path], Any]] = {
    "a pipe": os.mkfifo,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a directory": Path.mkdir,
    "a socket": bind,
    "nothing but holes": lambda path: (path.touch(), lengthen(path, 900 << 20)),
}
LENGTHENED = {"a hole at its end": 900 << 20, "a large hole at its end": 1 << 40}
KINDS = ("run-directory", "huggingface", "dcp", "zero", "drives")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("originals")
    for kind in KINDS:
        (place / kind).mkdir()
        MAKERS[kind](place / kind)
    (place / "zero" / "latest").write_text("step")
    return place


def use(place: Path) -> None:
    """Have all commands look at a directory."""
    uses: list[Callable[[], Any]] = [
        lambda: verify(place),
        lambda: inspect(place),
        lambda: list(find_runs(place.parent)),
        lambda: remove_leftovers(place),
        lambda: export(place, place.with_name("model.pt"), "torch"),
        lambda: export(place, place.with_name("all"), "dcp", what="all"),
    ]
    for one in uses:
        with suppress(SwapperError):
            one()


@pytest.mark.parametrize("way", [*PUT, *LENGTHENED])
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_has_a_files_name_no_command_hangs(kind: str, way: str, originals: Path, tmp_path: Path) -> None:
    for number, name in enumerate(sorted(path.name for path in (originals / kind).iterdir())):
        place = tmp_path / str(number) / "rank-0-of-1"
        shutil.copytree(originals / kind, place)
        if way in PUT:
            (place / name).unlink()
            PUT[way](place / name)
        else:
            lengthen(place / name, LENGTHENED[way])
        before = peak_resident_bytes(reset=True)
        use(place)
        grown = (peak_resident_bytes() or 0) - (before or 0)
        assert grown < MAX_GROWTH_BYTES, f"{name}: {grown >> 20} MiB"

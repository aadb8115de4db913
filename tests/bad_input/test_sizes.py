"""A size is read in one way wherever a user gives one: what could mean two things is refused with what to say."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from infer.host_device import HostDevice
from torch import nn
from transformers import LlamaConfig
from typer.testing import CliRunner
from unit.test_face import documented, public

import swapper
from swapper.checkpoint.exporting import export
from swapper.cli import app
from swapper.integrations import diffusers, transformers
from swapper.runtime.sizes import parse_bytes, parse_bytes_a_second

AMBIGUOUS = {"64Gb": "say 64GB for bytes of 1000, 64GiB for", "64G": "say 64GB for bytes of 1000", "64": "say 64GiB"}
COMMANDS = Path(swapper.__file__).parent / "cli"
PLAN = {
    "--host": "1GiB",
    "--nvme": "1GB/s,1GB/s",
    "--tokens": "8",
    "--flops": "1e12",
    "--updates": "1e9",
    "--ranks": "2",
}


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1B", 1), ("8GiB", 8 << 30), ("8GIB", 8 << 30), ("500MB", 500 * 10**6), ("1.5kB", 1500), ("64KB", 64000),
        (" 2 TiB ", 2 << 40), ("0.5TB", 5 * 10**11), (7, 7),
    ],
    ids=str,
)  # fmt: skip
def test_a_size_that_can_mean_one_thing_only(text: int | str, nbytes: int) -> None:
    assert parse_bytes(text, "x") == nbytes
    assert parse_bytes_a_second(text if isinstance(text, int) else f"{text}/s", "x") == nbytes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("64Gb", "Gb could mean bits or bytes, of 1000 or 1024: say 64GB for bytes of 1000, 64GiB for those of 1024"),
        ("64gb", "say 64GB for bytes of 1000, 64GiB for"),
        ("64 g", "g could mean bits or bytes, of 1000 or 1024: say 64GB"),
        ("1.5T", "say 1.5TB for bytes of 1000, 1.5TiB for"),
        ("64Gib", "Gib could mean bits or bytes: say 64GiB for bytes"),
        ("64mi", "mi could mean bits or bytes: say 64MiB for bytes"),
        ("7b", "b could mean bits or bytes: say 7B for bytes"),
        ("64", " has no unit: say 64GiB, or 64B for single bytes"),
        ("64GB/h", "is not a size"),
        ("9" * 400 + "GB", "is not a size"),
        ("64 gigs", "is not a size"),
        ("-1GB", "is not a size"),
        ("0GB", "must be more than 0"),
    ],
)
def test_a_size_that_could_mean_two_things_is_refused_with_what_to_say(text: str, said: str) -> None:
    with pytest.raises(swapper.ConfigError, match=f"^x='{text[:9]}.*{said}"):
        parse_bytes(text, "x")


def test_a_rate_in_bits_is_refused_too() -> None:
    for text in ("7Gb/s", "7Gbps", "7gbps"):
        with pytest.raises(swapper.ConfigError, match="say 7GB for bytes of 1000"):
            parse_bytes_a_second(text, "x")
    assert parse_bytes_a_second("7GBps", "x") == 7 * 10**9


# --- Python's entries -----------------------------------------------------------------------------------------------------


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(64, 64)
    return model, torch.optim.AdamW(model.parameters())


def managed(at: Path, act: Callable[..., Any]) -> Any:
    with swapper.SwapManager(at / "run", "8MiB") as manager:
        return act(manager, *small())


def saved(at: Path) -> Path:
    torch.save(small()[0].state_dict(), at / "net.pt")
    return at / "net.pt"


def shared(size: str) -> None:
    with swapper.shared_memory(size):
        pass


def streamed(**options: Any) -> None:
    with transformers.streamed(**options):
        transformers.from_pretrained(None, "nowhere", **options)


Entry = Callable[[str, Path], Any]
RATE = {"tokens": 4, "drive_read": "1GB", "drive_write": "1GB"}
THERE: dict[str, Any] = {"device": HostDevice()}
ENTRIES: dict[str, Entry] = {
    "SwapManager.host_memory": lambda size, at: swapper.SwapManager(at, host_memory=size),
    "SwapManager.plan.device_memory": lambda size, at: managed(
        at, lambda manager, *ours: manager.plan(*ours, **THERE, device_memory=size)
    ),
    "SwapManager.offload.device_memory": lambda size, at: managed(
        at, lambda manager, *ours: manager.offload(*ours, **THERE, device_memory=size)
    ),
    **{
        f"SwapManager.fastest.{name}": lambda size, at, name=name: managed(
            at, lambda manager, *ours: manager.fastest(*ours, **{**RATE, name: size})
        )
        for name in ("drive_read", "drive_write")
    },
    **{
        f"Plan.predict.{name}": lambda size, at, name=name: managed(
            at, lambda manager, *ours: manager.plan(*ours).predict(**{**RATE, name: size})
        )
        for name in ("drive_read", "drive_write")
    },
    **{
        f"SwapManager.fastest.{name}": lambda size, at, name=name: managed(
            at,
            lambda manager, *ours: manager.fastest(*ours, tokens=4, **{"drive_read": 1, "drive_write": 1, name: size}),
        )
        for name in ("drive_read", "drive_write")
    },
    "load.host_memory": lambda size, at: swapper.load(small()[0], saved(at), host_memory=size),
    "load.device_memory": lambda size, at: swapper.load(small()[0], saved(at), **THERE, device_memory=size),
    "plan_load.host_memory": lambda size, at: swapper.plan_load(small()[0], saved(at), host_memory=size),
    "LoadPlan.predict.drive_read": lambda size, at: swapper.plan_load(
        small()[0], saved(at), host_memory="8MiB"
    ).predict(4, drive_read=size),
    "shared_memory.host_memory": lambda size, _: shared(size),
    **{
        f"offload_activations.{name}": lambda size, at, name=name: managed(
            at, lambda manager, *_: swapper.offload_activations(manager, **{name: size})
        )
        for name in ("host_memory", "device_memory", "min_bytes")
    },
    "export.shard_bytes": lambda size, at: export(saved(at), at / "hf", "huggingface", shard_bytes=size),  # type: ignore[arg-type]
    **{
        f"{name}.host_memory": lambda size, at, function=function: function(None, at, host_memory=size)
        for name, function in (
            ("transformers.from_pretrained", transformers.from_pretrained),
            ("diffusers.from_pretrained", diffusers.from_pretrained),
        )
    },
    **{
        f"{name}.device_memory": lambda size, at, function=function: function(None, at, **THERE, device_memory=size)
        for name, function in (
            ("transformers.from_pretrained", transformers.from_pretrained),
            ("diffusers.from_pretrained", diffusers.from_pretrained),
        )
    },
    **{
        f"{name}.host_memory": lambda size, at: swapper.KVCache(LlamaConfig(), host_memory=size, directory=at)
        for name in ("KVCache", "transformers_cache.KVCache")
    },
    **{
        f"{name}.device_memory": lambda size, at: swapper.KVCache(
            LlamaConfig(), **THERE, device_memory=size, directory=at
        )
        for name in ("KVCache", "transformers_cache.KVCache")
    },
    "transformers.streamed.host_memory": lambda size, _: streamed(host_memory=size),
    "transformers.streamed.device_memory": lambda size, _: streamed(**THERE, device_memory=size),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_python_refuses_a_size_that_could_mean_two_things(entry: str, tmp_path: Path) -> None:
    option = entry.rpartition(".")[2]
    for size, said in AMBIGUOUS.items():
        with pytest.raises(swapper.ConfigError, match=rf"{option}='{size}'.*{said}"):
            ENTRIES[entry](size, tmp_path)


def sizes_of(value: Any) -> Iterator[str]:
    for parameter in inspect.signature(value).parameters.values():
        if str(parameter.annotation) in ("int | str", "int | str | None"):
            yield parameter.name


def test_each_size_of_the_public_face_is_tried() -> None:
    found = {f"{at}.{size}" for name, of in public() for at, one, _ in documented(of, name) for size in sizes_of(one)}
    assert found <= ENTRIES.keys() and len(found) > 15


# --- the commands ---------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, Callable[[str, Path], list[str]]] = {
    **{
        f"plan {option}": lambda size, _, option=option: [
            "plan", "none.json", *(word for pair in {**PLAN, option: size}.items() for word in pair)
        ]
        for option in ("--host", "--network", "--endurance")
    },
    "plan --nvme": lambda size, _: ["plan", "none.json", "--host", "1GiB", "--nvme", f"{size},1GB/s"],
    **{
        f"plan {option}": lambda size, _, option=option: [
            "plan", "none.json",
            *(word for pair in {**PLAN, "--device": "1GiB", option: size}.items() for word in pair),
        ]
        for option in ("--device", "--link")
    },
    "plan --device-memory": lambda size, _: [
        "plan", "none.json", *(word for pair in {**PLAN, "--device": "H100"}.items() for word in pair), "--device-memory", size
    ],
    "bench --file-size": lambda size, at: ["bench", str(at), "--file-size", size],
    "bench --sizes": lambda size, at: ["bench", str(at), "--file-size", "8MiB", "--sizes", size],
    "tune --file-size": lambda size, at: ["tune", str(at), "--file-size", size],
    "demo --budget": lambda size, at: ["demo", "--directory", str(at), "--budget", size],
    "export --shard": lambda size, at: ["export", str(at), str(at / "x"), "--to", "huggingface", "--shard", size],
}  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
def test_commands_refuse_a_size_that_could_mean_two_things(option: str, tmp_path: Path) -> None:
    for size, said in AMBIGUOUS.items():
        done = CliRunner(env={"COLUMNS": "300", "TERM": "dumb"}).invoke(app, OPTIONS[option](size, tmp_path))
        assert done.exit_code == 2, done.output
        assert re.search(rf"{option.split()[1]}='{size}'.*{said}", done.output), done.output


def test_each_size_of_the_commands_is_tried() -> None:
    sources = "".join(path.read_text() for path in COMMANDS.rglob("*.py"))
    found = set(re.findall(r"parse_bytes(?:_a_second)?\(\w+, \"(--[a-z-]+)\"\)", sources))
    assert found <= {option.split()[1] for option in OPTIONS} and len(found) > 5

"""`swapper runs`, `clean`, `inspect` and `export` of the directories of runs: what is there, and nothing else is touched."""

from __future__ import annotations

import importlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.models import Net, train_step
from e2e.processes import run_python
from e2e.twins import assert_same
from torch import nn
from typer.testing import CliRunner

import swapper
import swapper.cli
from swapper.cli import app
from swapper.durability.commit import encode_commit, read_commit

WIDE = {"COLUMNS": "40", "NO_COLOR": "1", "TERM": "dumb"}
"""A narrow terminal: tables must not wrap in it."""


def run_here(*arguments: object) -> Any:
    return CliRunner(env=WIDE).invoke(app, [*map(str, arguments)], prog_name="swapper")


def parsed(*arguments: object) -> Any:
    done = run_here(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def train(directory: Path, steps: int = 2, others: tuple[Path, ...] = (), **options: Any) -> dict[str, torch.Tensor]:
    """Leave a run in `directory`; return its parameters."""
    torch.manual_seed(0)
    model = Net()
    kept = {"params": "nvme", "optimizer_state": "nvme", **options}
    with swapper.SwapManager([directory, *others] if others else directory, host_memory="32MiB") as manager:
        model, optimizer = manager.offload(model, torch.optim.AdamW(model.parameters()), **kept)
        for _ in range(steps):
            train_step(model, optimizer)
        with manager.gather(model):
            return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def uncommitted(directory: Path) -> None:
    train(directory, params="host", optimizer_state="host")


def assert_exported(path: Path, parameters: dict[str, torch.Tensor]) -> None:
    found = torch.load(path, weights_only=True)
    assert found.keys() == parameters.keys()
    assert all(torch.equal(found[name], value) for name, value in parameters.items())


def entries(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def test_runs_are_listed_a_line_each(tmp_path: Path) -> None:
    train(tmp_path / "a")
    uncommitted(tmp_path / "b")
    with swapper.SwapManager(tmp_path / "c", host_memory="32MiB") as manager:
        manager.offload(nn.Linear(8, 8))
        done = run_here("runs", tmp_path)
        found = parsed("runs", tmp_path)
    assert done.exit_code == 0
    heading, *lines = done.stdout.splitlines()
    assert heading.split() == ["step", "parameters", "size", "state", "optimizer", "directory"]
    assert len(lines) == 3 and "\x1b" not in done.stdout
    count = sum(parameter.numel() for parameter in Net().parameters())
    assert re.match(rf" +2 +{count:,} .* free +AdamW +{tmp_path}/a/rank-0-of-1$", lines[0])
    assert re.search(r"never committed .*b/rank-0-of-1$", lines[1])
    assert re.search(rf"in use by {os.getpid()} ", lines[2])
    assert [run["step"] for run in found][:2] == [2, None]
    assert found[0]["parameters"] == count
    assert found[0]["bytes"] >= count * 4 * 3
    assert [run["in_use_by"] for run in found] == [None, None, str(os.getpid())]
    (tmp_path / "empty").mkdir()
    assert f"no run in {tmp_path / 'empty'}" in run_here("runs", tmp_path / "empty").stdout


def test_a_sealed_record_that_contradicts_itself_is_named_too(tmp_path: Path) -> None:
    train(tmp_path)
    run = tmp_path / "rank-0-of-1"
    record = read_commit(run)
    assert record is not None
    (run / "commit.pt").write_bytes(encode_commit(replace(record, plans=["head.weight param: nn [2] at 0"])))
    done = run_here("runs", tmp_path)
    assert done.exit_code == 1 and "unreadable" in done.stdout
    assert "contradicts itself" in json.loads(run_here("runs", tmp_path, "--json").stdout)[0]["problem"]


def test_a_damaged_run_is_named_and_counts_as_a_failure(tmp_path: Path) -> None:
    train(tmp_path)
    (tmp_path / "rank-0-of-1" / "commit.pt").write_bytes(b"nonsense")
    done = run_here("runs", tmp_path)
    assert done.exit_code == 1
    assert "unreadable" in done.stdout
    cleaned = run_here("clean", tmp_path, "--yes")
    assert cleaned.exit_code == 1
    assert "commit.pt" in cleaned.output
    assert len(list(tmp_path.rglob("*.swap"))) == 2, "nothing of it is removed"


def test_clean_removes_what_nothing_can_use_and_nothing_else(tmp_path: Path) -> None:
    parameters = train(tmp_path / "kept")
    uncommitted(tmp_path / "dead")
    run, dead = tmp_path / "kept" / "rank-0-of-1", tmp_path / "dead" / "rank-0-of-1"
    (run / "turn-7.swap").write_bytes(b"x" * 5000)  # of a killed relayout
    (run / "scratch-1.swap").write_bytes(b"x" * 5000)
    (run / "mine.swap").write_bytes(b"a user's")
    (run / "notes.txt").write_text("a user's")
    (dead / "notes.txt").write_text("a user's")
    (tmp_path / "turn-0.swap").write_text("a user's, in no run")
    before = entries(tmp_path)
    asked = run_here("clean", tmp_path)
    assert asked.exit_code == 2 and "say --yes" in asked.output
    found = parsed("clean", tmp_path)
    assert [Path(file["path"]).name for file in found["leftovers"]] == ["turn-0.swap", "scratch-1.swap", "turn-7.swap"]
    assert found["removed"] == []
    assert entries(tmp_path) == before
    done = run_here("clean", tmp_path, "--yes")
    assert done.exit_code == 0, done.output
    assert "removed 3 files" in done.stdout
    gone = {"kept/rank-0-of-1/turn-7.swap", "kept/rank-0-of-1/scratch-1.swap"}
    gone |= {"dead/rank-0-of-1/turn-0.swap", "dead/rank-0-of-1/lock"}
    assert set(before) - set(entries(tmp_path)) == gone
    assert "nothing to remove" in run_here("clean", tmp_path).stdout
    torch.manual_seed(0)
    model = Net()
    with swapper.SwapManager(tmp_path / "kept", host_memory="32MiB", resume="auto") as manager:
        model, _ = manager.offload(model, torch.optim.AdamW(model.parameters()))
        assert manager.step == 2
        assert_same({name: p.detach() for name, p in model.state_dict().items()}, parameters)


def test_a_run_that_is_gone_leaves_no_directory(tmp_path: Path) -> None:
    uncommitted(tmp_path)
    assert run_here("clean", tmp_path, "-y").exit_code == 0
    assert entries(tmp_path) == []


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("drives", [1, 2])
def test_a_run_that_was_closed_leaves_nothing_to_clean(tmp_path: Path, steps: int, drives: int) -> None:
    """After a snapshot, whose file another has replaced, and when it is resumed and no step is taken."""
    directories = [tmp_path / f"drive-{number}" for number in range(drives)]
    expected: dict[str, torch.Tensor] = {}
    for number, taken in enumerate((3, steps, 0)):
        model = Net()
        with swapper.SwapManager(directories, host_memory="32MiB", resume="auto") as manager:
            model, optimizer = manager.offload(
                model, torch.optim.AdamW(model.parameters()), params="nvme", optimizer_state="nvme"
            )
            assert_same({name: p.clone() for name, p in model.state_dict().items()} if expected else {}, expected)
            for _ in range(taken):
                train_step(model, optimizer)
            manager.snapshot(tmp_path / f"{number}.pt")
            expected = {name: p.clone() for name, p in model.state_dict().items()}
        found = parsed("runs", tmp_path)
        assert [run["leftovers"] for run in found] == [[]] * drives
        assert run_here("verify", directories[0]).exit_code == 0


def test_a_run_in_use_and_its_other_drive_are_left_alone(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    train(first, others=(second,))
    assert parsed("clean", tmp_path)["leftovers"] == [], "the first drive's commit names the second's files"
    with swapper.SwapManager([first, second], host_memory="32MiB", resume="auto") as manager:
        model = Net()
        model, optimizer = manager.offload(model, torch.optim.AdamW(model.parameters()))
        (first / "rank-0-of-1" / "turn-9.swap").write_bytes(b"x" * 5000)
        assert parsed("clean", tmp_path, "--yes")["removed"] == []
        train_step(model, optimizer)
    first.rename(tmp_path / "unmounted")
    (second / "rank-0-of-1" / "turn-9.swap").write_bytes(b"x" * 5000)
    assert parsed("clean", second, "--yes")["leftovers"] == [], "what the first drive says is not known"
    (tmp_path / "unmounted").rename(first)
    assert [Path(name).name for name in parsed("clean", second, "--yes")["removed"]] == ["turn-9.swap"]


def test_a_run_is_inspected_and_exported_as_it_was_committed(tmp_path: Path) -> None:
    parameters = train(tmp_path / "run", steps=3)
    found = parsed("inspect", tmp_path / "run")
    assert (found["kind"], found["step"]) == ("run", 3)
    described = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert described["head.weight"]["shape"] == list(parameters["head.weight"].shape)
    assert described["head.weight exp_avg"]["bytes"] == parameters["head.weight"].nbytes
    assert max(tensor["pieces"] for tensor in found["tensors"]) > 1, (
        "no tensor lies in several pieces: nothing is tested"
    )
    lines = run_here("inspect", tmp_path / "run" / "rank-0-of-1").stdout.splitlines()
    assert [line for line in lines if line.startswith("head.weight ")], "one line a tensor, however narrow"
    for to, name in (("torch", "x.pt"), ("safetensors", "x.safetensors")):
        done = run_here("export", tmp_path / "run", tmp_path / name, "--to", to, "--quiet")
        assert done.exit_code == 0, done.output
    assert_exported(tmp_path / "x.pt", parameters)
    again = run_here("export", tmp_path / "run", tmp_path / "x.pt", "--to", "torch")
    assert again.exit_code == 1 and "say --overwrite" in again.output and "overwrite=True" not in again.output


def test_a_run_over_two_drives_is_exported(tmp_path: Path) -> None:
    parameters = train(tmp_path / "a", others=(tmp_path / "b",))
    done = run_here("export", tmp_path / "a", tmp_path / "x.pt", "--to", "torch", "--quiet")
    assert done.exit_code == 0, done.output
    assert_exported(tmp_path / "x.pt", parameters)


def test_what_cannot_be_exported_is_named(tmp_path: Path) -> None:
    def error(*arguments: object) -> str:
        done = run_here(*arguments)
        assert done.exit_code == 1, done.output
        return " ".join(done.output.split())

    uncommitted(tmp_path / "dead")
    assert "holds a run without a commit" in error("export", tmp_path / "dead", tmp_path / "x.pt", "--to", "torch")
    assert "holds a run without a commit" in error("inspect", tmp_path / "dead" / "rank-0-of-1")
    train(tmp_path / "run")
    said = error("export", tmp_path / "run", tmp_path / "x.pt", "--to", "torch", "--what", "all")
    assert "take a snapshot" in said
    with swapper.SwapManager(tmp_path / "run", host_memory="32MiB", resume="auto"):
        assert "is in use by a run: read it later" in error("inspect", tmp_path / "run")
    (tmp_path / "run" / "rank-0-of-1").rename(tmp_path / "run" / "rank-1-of-2")
    train(tmp_path / "other")
    (tmp_path / "other" / "rank-0-of-1").rename(tmp_path / "run" / "rank-0-of-2")
    assert "holds the runs of 2 ranks: name one" in error("inspect", tmp_path / "run")


COMMANDS = (
    "demo",
    "doctor",
    "bench",
    "tune",
    "plan",
    "runs",
    "clean",
    "verify",
    "inspect",
    "export",
    "trace",
    "report",
)


def test_help_is_readable_at_forty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    narrow = importlib.reload(swapper.cli).app
    monkeypatch.undo()
    wide = importlib.reload(swapper.cli).app
    shown = CliRunner().invoke(narrow, ["--help"], prog_name="swapper").stdout
    assert max(map(len, shown.splitlines())) <= 40
    assert "and whether a process uses them." in " ".join(shown.split())  # what a command does, in whole
    for command in COMMANDS:
        done = CliRunner().invoke(narrow, [command, "--help"], prog_name="swapper")
        assert done.exit_code == 0
        longest = 44 if command == "demo" else 40  # beside --drive-seconds, a text as narrow as the library makes it
        assert max(map(len, done.stdout.splitlines())) <= longest, command
        assert "…" not in done.stdout, f"a name is cut off in {command}"
        options = re.findall(r"^  (?:-\w, )?(--[a-z-]+)", done.stdout, re.MULTILINE)
        assert command == "trace" or "--json" in options, command
        assert "─" in CliRunner(env={"COLUMNS": "100"}).invoke(wide, [command, "--help"]).stdout


def test_piped_output_is_plain(tmp_path: Path) -> None:
    train(tmp_path)
    done = run_python("-m", "swapper.__main__", "runs", tmp_path, COLUMNS="20", FORCE_COLOR="", TERM="xterm-256color")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2 and "\x1b" not in done.stdout


def test_errors_name_the_options_of_the_command(tmp_path: Path) -> None:
    arguments = ["demo", "--budget", "1MB", "--parameters", "1M", "--steps", "1", "--directory", tmp_path]
    done = run_here(*arguments, "--drive-seconds", "0.05")
    assert done.exit_code == 1
    assert "--budget" in done.output and "host_memory" not in done.output
    for command in ("tune", "bench"):
        missing = run_here(command, tmp_path / "absent")
        assert "is not a directory; make it, or name another" in " ".join(missing.output.split())
        assert "--directory" not in missing.output

"""`swapper plan` predicts from a configuration alone, and says what is wrong with what it is given."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from swapper.bench.gpt import GptConfig, make_gpt
from swapper.cli import app


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).invoke(app, list(arguments))


def small_gpt() -> object:
    """A model for `swapper plan`, which makes it on the meta device."""
    return make_gpt(GptConfig(vocabulary=512, context=32, layers=4, width=256), torch.get_default_dtype())


def test_plan_predicts_a_step_from_a_models_function_alone() -> None:
    command = [
        "plan",
        "unit.test_plan_command:small_gpt",
        "--host",
        "24MB",
        "--drive-read",
        "100MB",
        "--drive-write",
        "50MB",
    ]
    command += ["--tokens", "64", "--flops", "1e12", "--updates", "1e9"]
    done = run(*command, "--json")
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    assert figures["places"]["state"] == "nvme"
    parameters = GptConfig(vocabulary=512, context=32, layers=4, width=256).parameters
    assert figures["step_s"] >= max(figures["read_bytes"] / 100e6, figures["written_bytes"] / 50e6) * 0.9
    assert sum(phase["update_s"] for phase in figures["phases"].values()) == pytest.approx(parameters / 1e9, rel=0.01)
    assert figures["upgrades_step_s"]["a drive twice as fast"] < 0.6 * figures["step_s"]
    text = run(*command).stdout
    assert "optimizer state" in text and "with twice the host memory" in text


def test_a_models_function_is_found_in_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_net.py").write_text("from torch import nn\n\ndef net():\n    return nn.Linear(64, 64)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    command = ["plan", "my_net:net", "--host", "1GB", "--drive-read", "1GB", "--drive-write", "1GB"]
    done = run(*command, "--flops", "1e12", "--updates", "1e9", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["step_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nowhere/config.json"], "nowhere/config.json does not exist"),
        (["no_such_module:model"], "no_such_module:model cannot be imported"),
        (["unit.test_plan_command:run"], "returned a Result: it must return a torch.nn.Module"),
        (["builtins:chr"], "no model can be made from builtins:chr: TypeError"),
        (["unit.test_plan_command:small_gpt", "--optimizer", "shampoo"], "--optimizer shampoo is not known"),
        (["unit.test_plan_command:small_gpt", "--flops", "0"], "--flops"),
        (["unit.test_plan_command:small_gpt", "--host", "much"], "--host='much' is not a size"),
    ],
    ids=str,
)
def test_plan_says_what_is_wrong(arguments: list[str], named: str) -> None:
    given = ["--host", "24MB", "--drive-read", "100MB", "--drive-write", "50MB"]
    done = run("plan", arguments[0], *given, *arguments[1:])
    assert done.exit_code == 2
    assert named in done.output.replace("\n", "")

"""A person gets, unasked, one line of what was chosen, a bar for long work, and in a notebook errors that begin with the remedy."""

from __future__ import annotations

import logging
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from swapper import BudgetError, SwapManager
from swapper.runtime import notices

SETUP = """
import torch
import swapper
from torch import nn

def offload(directory, params="auto", width=64, **options):
    model = nn.Linear(width, width)
    manager = swapper.SwapManager(directory, host_memory="64MiB", **options)
    return manager, *manager.offload(model, torch.optim.SGD(model.parameters()), params=params)
"""


RunPython = Callable[..., subprocess.CompletedProcess[str]]


def run(run_python: RunPython, text: str) -> list[str]:
    done = run_python(SETUP + textwrap.dedent(text))
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("swapper:")]


def test_offload_prints_one_line_of_what_was_chosen(tmp_path: Path, run_python: RunPython) -> None:
    (line,) = run(run_python, f"offload({str(tmp_path)!r})[0].close()")
    assert line.startswith("swapper: offload: Linear, ") and "SGD: params on host, gradients on host; " in line


def test_a_program_with_logging_of_its_own_gets_no_line(tmp_path: Path, run_python: RunPython) -> None:
    text = f"import logging; logging.basicConfig(); offload({str(tmp_path)!r})[0].close()"
    assert run(run_python, text) == []
    silent = f"import logging; logging.getLogger('swapper').setLevel('WARNING'); offload({str(tmp_path / 'other')!r})[0].close()"
    assert run(run_python, silent) == []


def test_lines_name_swapper_and_the_step_of_a_resumed_run(tmp_path: Path, run_python: RunPython) -> None:
    begun, resumed, warning = run(
        run_python,
        f"""
        import logging

        def run(resume):
            manager, model, optimizer = offload({str(tmp_path)!r}, "nvme", 1024, resume=resume)
            model.weight.norm()
            return manager, model, optimizer

        logging.getLogger("swapper").setLevel("ERROR")
        manager, model, optimizer = run("error")
        for _ in range(2):
            model(torch.ones(1, 1024)).sum().backward()
            optimizer.step()
        manager.close()
        logging.getLogger("swapper").setLevel(logging.NOTSET)
        offload({str(tmp_path / "other")!r})[0].close()
        run("auto")[0].close()
        logging.getLogger("swapper").addHandler(logging.NullHandler())  # a program with logging of its own
        run("auto")[0].close()
        """,
    )
    assert "resumed" not in begun and resumed.endswith("; resumed from step 2")
    assert warning.startswith("swapper: ") and "reads parameter weight, which is away" in warning


def test_a_cell_that_runs_again_closes_its_earlier_manager(tmp_path: Path, run_python: RunPython) -> None:
    """Python's prompt and a notebook define sys.ps1."""
    lines = run(
        run_python,
        f"""
        import sys
        sys.ps1 = "In [1]: "
        first = offload({str(tmp_path)!r})
        second = offload({str(tmp_path)!r}, resume="discard")
        second[1](torch.ones(1, 64)).sum().backward()
        second[2].step()
        second[0].close()
        """,
    )
    assert [line for line in lines if "closed the manager" in line] == [
        f"swapper: closed the manager of {tmp_path} that was open in this process, for a new one"
    ]


def test_an_error_in_a_notebook_begins_with_its_message_and_has_the_users_lines(tmp_path: Path) -> None:
    with pytest.raises(BudgetError) as caught, SwapManager(tmp_path, host_memory="1MiB") as manager:
        from torch import nn

        manager.offload(nn.Linear(1024, 1024))
    shown = caught.value._render_traceback_()
    assert shown[0].startswith("BudgetError: host_memory=1.0 MiB is too small: ") and "raise host_memory" in shown[0]
    assert len(shown) == 3 and __file__ in shown[2] and "manager.offload" in shown[2]


def test_long_work_has_a_bar_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> str:
        assert list(notices.tracked([1, 2, 3], "making the swap files", lambda item: item << 20)) == [1, 2, 3]
        return capsys.readouterr().err

    monkeypatch.setattr(notices, "PATIENCE_S", 0.0)
    assert work() == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes any output for a terminal then
    assert "making the swap files" in work()
    monkeypatch.setenv("RANK", "1")
    assert work() == ""


def test_a_log_gets_the_notice(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    with caplog.at_level(logging.INFO, logger="swapper"):
        notices.notify("so it is")
    assert "so it is" in caplog.text and capsys.readouterr().err == ""

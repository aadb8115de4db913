"""`swapper demo`: wrong arguments say what is right; a small run goes to its end, agrees with plain torch, tidies up."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from e2e.processes import run_python, started_python
from rich.console import Console
from typer.testing import CliRunner

from swapper.bench.hardware import (
    DriveSpeed,
    StepLimit,
    check_directory,
    choose_directory,
    measure_drive,
)
from swapper.bench.plain import Corpus, Gpt, GptConfig, PlainTraining, make_gpt
from swapper.cli import app, demo_ranks
from swapper.cli.demo_ranks import RanksTask
from swapper.cli.doctor import filesystem_of
from swapper.errors import DirectoryError

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--parameters", "1M", "--steps", "4", "--batch", "1", "--context", "16", "--budget", "64MB"]
SMALL += ["--drive-seconds", "0.05"]


def run(*arguments):
    return run_python("-m", "swapper.__main__", *arguments, COLUMNS="200", NO_COLOR="1", TERM="dumb")


def run_here(*arguments):
    """Run a command in this process: what ends early needs none of its own."""
    runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    return runner.invoke(app, [*map(str, arguments)], prog_name="swapper")


@pytest.mark.whole
@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--precision", "fp8"], "bf16 or fp32"),
        (["--parameters", "many"], "100M"),
        (["--parameters", "3"], "100M"),
        (["--parameters", "1e999"], "100M"),
        (["--budget", "5q"], "8GiB"),
        (["--steps", "0"], "--steps"),
        (["--nonsense"], "--nonsense"),
        (["--snapshot", "/does/not/exist/x.pt"], "/does/not/exist"),
    ],
)
def test_wrong_arguments_exit_2_and_say_what_is_right(arguments, word):
    done = run_here("demo", *arguments)
    assert done.exit_code == 2
    assert isinstance(done.exception, SystemExit)  # no traceback
    assert word in done.output


@pytest.mark.whole
@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", ".", "--chart", "FILE"],
        ["trace", "--output", "FILE", "nothing.py"],
    ],
    ids=lambda arguments: " ".join(arguments[::2]),
)
def test_what_a_command_writes_at_its_end_is_refused_before_its_work(tmp_path, arguments):
    mine = tmp_path / "mine.html"
    mine.write_text("mine")
    for place, reason in ((mine, "exists already: name a new file"), ("/does/not/exist/x.html", "mkdir -p")):
        done = run_here(*(place if word == "FILE" else word for word in arguments))
        assert done.exit_code == 2 and isinstance(done.exception, SystemExit)
        assert f"{place} " in done.output and reason in done.output
    assert mine.read_text() == "mine"


def test_a_missing_directory_is_named():
    done = run_here("demo", "--directory", "/does/not/exist")
    assert done.exit_code == 1
    assert "/does/not/exist is not a directory" in done.stdout
    assert "--directory" in done.stdout


def test_too_little_space_says_how_much_is_needed(tmp_path):
    with pytest.raises(DirectoryError, match=r"free and this needs 1024\.0 TiB"):
        check_directory(tmp_path, 1 << 50)


def test_help_and_version():
    assert "demo" in run_here("--help").stdout
    assert re.fullmatch(r"swapper \d+\.\d+\.\d+\n", run_here("--version").stdout)


def test_a_wrong_argument_ends_the_process_with_2_and_no_traceback():
    done = run("demo", "--precision", "fp8")
    assert done.returncode == 2
    assert "bf16 or fp32" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("precision", "keeps"), [("bf16", True), ("fp32", False)])
def test_the_demo_trains_and_plain_torch_goes_on_bit_for_bit(tmp_path, precision, keeps):
    kept = tmp_path / "kept.pt"
    snapshot = ["--snapshot", kept] if keeps else []
    done = run("demo", *SMALL, "--precision", precision, "--directory", tmp_path, *snapshot)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit for bit" in done.stdout
    swapped = re.search(r"Next losses, swapped\W+([\d. ]+)", done.stdout).group(1).split()
    plain = re.search(r"Next losses, plain torch\W+([\d. ]+)", done.stdout).group(1).split()
    assert len(swapped) == 2
    assert swapped == plain
    read, written = re.search(r"Moved in a step\W+read ([\d,]+) MB, written ([\d,]+) MB", done.stdout).groups()
    assert (read, written) != ("0", "0")
    assert list(tmp_path.iterdir()) == ([kept] if keeps else [])
    if keeps:
        assert set(torch.load(kept, mmap=True, weights_only=True)) >= {"model", "optimizer", "master"}


def test_the_demo_of_ranks_is_killed_resumes_and_is_plain_fsdp2_bit_for_bit(tmp_path):
    (tmp_path / "place").mkdir()
    done = run("demo", *SMALL, "--precision", "fp32", "--ranks", "2", "--directory", tmp_path / "place", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "plain FSDP2, bit for bit" in done.stderr
    assert list((tmp_path / "place").iterdir()) == []
    measured = json.loads(done.stdout)
    assert measured["losses"] == measured["plain_losses"]
    assert len(measured["losses"]) == 4
    assert measured["resumed_at"] in (1, 2, 3)
    assert sum(measured["written_bytes"]) > 0  # a write that ends in the next step counts there


def test_the_demo_of_one_rank_is_killed_and_resumes_and_what_differs_is_said(tmp_path):
    """Of more ranks, and as a command: above."""
    config = GptConfig(vocabulary=256, context=16, layers=2, width=64)
    task = RanksTask(
        ranks=1, config=config, masters=False, steps=4, batch=1, given_budget_bytes=None, learning_rate=1e-3, drive_s=0.05,
    )  # fmt: skip
    stages = []
    record = demo_ranks.measure(task, tmp_path, lambda stage, losses: stages.append((stage, len(losses))))
    assert record.is_equal and len(record.losses) == 4 and record.killed_after == 2 and record.resumed_at in range(1, 5)
    assert ("training", 1) in stages and stages[-1] == ("the same in plain FSDP2", 4)
    assert task.disk_bytes > 3 * task.state_bytes and task.budget_bytes >= 96 << 20
    console = Console(record=True, width=200, file=io.StringIO())
    demo_ranks.show(console, record)
    assert "plain FSDP2, bit for bit" in console.export_text(clear=False)
    record.different = ["layers.0 of rank 0"]
    demo_ranks.show(console, record)
    assert "They differ from plain FSDP2's (layers.0 of rank 0)" in console.export_text()


def processes_with(text):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if text in path.read_bytes().decode(errors="replace"):
                found.append(path)
    return found


@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGINT, 2)])
def test_interrupted_the_demo_leaves_nothing_behind(tmp_path, number, ranks):
    arguments = ["demo", *SMALL, "--steps", "100000", "--directory", tmp_path, "--ranks", ranks]
    with started_python("-m", "swapper.__main__", *arguments) as process:
        while not list(tmp_path.glob("*/run/*/commit.pt")):  # a step is done, and the next ones are under way
            assert process.is_running(), process.stdout.read() + process.stderr.read()
            time.sleep(0.05)
        process.send_signal(number)
        shown = process.stdout.read() + process.stderr.read()
        assert process.wait() == 130, shown
    assert "Interrupted" in shown
    assert "Traceback" not in shown
    assert list(tmp_path.iterdir()) == []
    assert processes_with(str(tmp_path)) == []


def test_a_budget_too_small_names_the_smallest_that_works(tmp_path):
    done = run_here("demo", *SMALL, "--budget", "64kB", "--directory", tmp_path)
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert "Error:" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_example_runs_as_it_is(tmp_path):
    size = ["--steps", "3", "--parameters", "2000000", "--context", "32"]
    for _ in range(2):  # the second finds the run complete
        done = run_python(ROOT / "examples" / "train.py", "--directory", tmp_path / "run", *size)
        assert done.returncode == 0, done.stdout + done.stderr
        swapped, plain = re.findall(r"held out  loss ([\d.]+)", done.stdout)
        assert swapped == plain


@pytest.mark.parametrize("parameters", [1_000_000, 50_000_000, 168_000_000, 1_300_000_000])
def test_a_config_has_the_parameters_that_were_asked_for(parameters):
    config = GptConfig.for_parameters(parameters, vocabulary=256, context=128)
    assert config.parameters == pytest.approx(parameters, rel=0.06)
    with torch.device("meta"):
        assert sum(p.numel() for p in Gpt(config).parameters()) == config.parameters


def test_plain_training_goes_on_from_what_it_saved():
    config, corpus = GptConfig(256, 16, 4, 64), Corpus(limit_bytes=100_000)
    torch.manual_seed(0)
    first = PlainTraining(make_gpt(config, torch.bfloat16), 1e-3, masters=True)
    for number in range(3):
        first.step(*corpus.batch(number, 2, 16))
    saved = {
        "model": {name: value.clone() for name, value in first.model.state_dict().items()},
        "optimizer": copy.deepcopy(first.optimizers[0].state_dict()),
        "master": {name: value.detach().clone() for name, value in first._masters.items()},
    }
    second = PlainTraining(make_gpt(config, torch.bfloat16), 1e-3, masters=True, saved=saved)
    batches = [corpus.batch(number, 2, 16) for number in range(3, 6)]
    assert [first.step(*batch) for batch in batches] == [second.step(*batch) for batch in batches]


def test_batches_are_the_same_each_time_and_within_the_vocabulary():
    one, other = Corpus(limit_bytes=200_000), Corpus(limit_bytes=200_000)
    tokens, targets = one.batch(7, 3, 20)
    assert torch.equal(tokens, other.batch(7, 3, 20)[0])
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert not torch.equal(tokens, one.batch(8, 3, 20)[0])
    wide = Corpus(8192, limit_bytes=200_000).batch(0, 8, 64, validation=True)[0]
    assert 256 < int(wide.max()) < 8192


def test_the_limit_is_the_longest_of_reads_writes_and_compute():
    limit = StepLimit.of(DriveSpeed(500e6, 250e6, 750e6), 1e9, 1e9, 3.0)
    assert (limit.read_s, limit.write_s, limit.seconds, limit.cause) == (2.0, 4.0, 4.0, "writes")
    assert StepLimit.of(DriveSpeed(1e9, 1e9, 2e9), 1e9, 1e9, 3.0).cause == "compute"


def test_the_limit_knows_a_drive_that_shares_one_speed_between_reads_and_writes():
    limit = StepLimit.of(DriveSpeed(1e9, 1e9, 1e9), 1e9, 1e9, 0.0)
    assert (limit.seconds, limit.cause) == (2.0, "reads and writes")


def test_a_drive_is_measured_and_nothing_is_left(tmp_path):
    speed = measure_drive(tmp_path, file_bytes=16 << 20, duration_s=0.2)
    assert speed.read_bytes_per_s > 0
    assert speed.write_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


PEAK_MEMORY = """
import mmap, time
from swapper.bench.measure import PeakMemory
with PeakMemory(interval_s=0.01) as memory:
    with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        held.write(bytes(64 << 20))
        while memory.growth_bytes < 60 << 20:
            time.sleep(0.01)
print(memory.growth_bytes)
"""


def test_peak_memory_sees_what_is_gone_again(run_python):
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("no /proc/self/smaps_rollup here")
    # By itself: where other tests freed memory, new memory is no growth of the process, nor is it while they free theirs.
    ended = run_python(PEAK_MEMORY)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 60 << 20


def test_the_chosen_directory_is_on_a_drive(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert filesystem_of(choose_directory()) not in ("tmpfs", "ramfs")

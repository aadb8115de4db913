"""Checks an installed wheel, in a directory of its own: it has every file of the package, the README's training block runs and
resumes, torch reads its snapshot, and every command does its work, in 40 columns and as JSON. cibuildwheel calls it.

    python tests/wheel.py                  takes three minutes, most of them to import torch
    python tests/wheel.py --no-commands    half a minute
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
SWAPPER = (str(Path(sysconfig.get_path("scripts"), "swapper")),)
MODULE = (sys.executable, "-m", "swapper")
QUICK = ("--file-size", "32MiB", "--seconds", "0.05")
SMALL = ("--steps", "3", "--parameters", "1M", "--context", "16", "--budget", "64MB", "--drive-seconds", "0.05")
PLAN = ("--host", "64MiB", "--nvme", "7GB/s,5GB/s", "--flops", "1e12", "--updates", "1e9")
MODEL = """
import torch

def make_model():
    return torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
"""
COMMANDS = [
    ("doctor", "."),
    ("bench", ".", *QUICK, "--no-step"),
    ("tune", ".", *QUICK),
    ("plan", "small:make_model", *PLAN),
    ("demo", *SMALL),
    ("runs", "."),
    ("inspect", "run1"),
    ("verify", "step-10.pt"),
    ("export", "run1", "{}.safetensors", "--to", "safetensors"),
    ("clean", ".", "--yes"),
]
"""Every command but `trace`, whose result is a file, and `report` of that. {} is another word in each call."""


def main() -> None:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        os.chdir(directory)
        os.environ["XDG_CONFIG_HOME"] = directory  # where `tune` writes
        check_files()
        check_readme()
        if sys.argv[1:] != ["--no-commands"]:
            check_commands()
        os.chdir("/")


def check_files() -> None:
    import swapper

    installed, sources = Path(swapper.__file__).parent, CHECKOUT / "swapper"
    assert installed != sources, f"{installed} is the checkout, and no installed wheel"
    if not sources.is_dir():
        return  # tools/test_arm takes the tests alone
    files = [path.relative_to(sources) for path in sources.rglob("*") if path.is_file()]
    wanted = [path for path in files if path.suffix not in (".so", ".pyc")]
    assert Path("py.typed") in wanted
    missing = [str(path) for path in wanted if not (installed / path).is_file()]
    assert not missing, f"not in the wheel: {missing}"


def check_readme() -> None:
    readme = (CHECKOUT / "README.md").read_text()
    train, load = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)[:2]
    Path("train.py").write_text(train + load + "print(sorted(state))\n")
    for _ in range(2):  # trains; finds the run complete
        run(sys.executable, "train.py")
    run(*MODULE, "verify", "step-10.pt")


def check_commands() -> None:
    Path("small.py").write_text(MODEL)
    assert run(*SWAPPER, "--version") == run(*MODULE, "--version")
    help_text = run(*SWAPPER, "--help")
    assert help_text == run(*MODULE, "--help")
    listed = set(re.findall(r"^ {2}(\w+)", help_text.partition("Commands:")[2], re.MULTILINE))
    assert listed == {name for name, *_ in COMMANDS} | {"trace", "report"}, listed
    for name in sorted(listed):
        run(*SWAPPER, name, "--help")
    for name, *arguments in COMMANDS:
        run(*SWAPPER, name, *(word.replace("{}", "plain") for word in arguments))
        json.loads(run(*MODULE, name, *(word.replace("{}", "json") for word in arguments), "--json"))
    Path("traced.py").write_text(Path("train.py").read_text().replace("run1", "run2").replace("step-10", "traced-10"))
    run(*SWAPPER, "trace", "traced.py")
    assert json.loads(Path("trace.json").read_text())["traceEvents"]
    json.loads(run(*SWAPPER, "report", "trace.json", "--json"))
    run(*SWAPPER, "report", "trace.json")
    assert "<html" in Path("trace.html").read_text()


def run(*command: str) -> str:
    """Run a command where a terminal would have 40 columns; return its standard output."""
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "40"})
    print(f"$ {' '.join(command)}\n{done.stdout[:3000]}{done.stderr}", flush=True)
    assert done.returncode == 0, f"{' '.join(command)} has ended with {done.returncode}"
    return done.stdout


if __name__ == "__main__":
    main()

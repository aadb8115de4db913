"""Checks an installed wheel: the README's training block runs and resumes, and torch reads its snapshot. cibuildwheel calls it."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    train, load = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)[:2]
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        os.chdir(directory)
        Path("train.py").write_text(train + load + "print(sorted(state))\n")
        for _ in range(2):  # trains; finds the run complete
            subprocess.run([sys.executable, "train.py"], check=True)
        subprocess.run([sys.executable, "-m", "swapper", "verify", "step-10.pt"], check=True)
        subprocess.run([sys.executable, "-m", "swapper", "--version"], check=True)
        os.chdir("/")


if __name__ == "__main__":
    main()

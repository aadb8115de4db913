"""Writes the one table, and the same as JSON, also in $OUT, after each row, so that nothing is lost."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from gpu.bench import Row


class Report:
    """The rows so far, and the hardware."""

    def __init__(self, hardware: dict[str, str], is_rehearsal: bool, path: Path | None) -> None:
        """`path`: of the JSON, if requested."""
        self.rows: list[Row] = []
        self._hardware = hardware
        self._is_rehearsal = is_rehearsal
        self._begin = time.monotonic()
        out = os.environ.get("OUT")
        self._files = [*([Path(out) / "gpu_check.json"] if out else []), *([path] if path else [])]

    def add(self, row: Row) -> None:
        self.rows.append(row)
        told = row.number or f"{row.status}: {row.reason}"
        print(f"  {row.figure}: {told}", flush=True)
        self.write()

    def write(self) -> None:
        """Write the JSON; called after each row."""
        told = self.json()
        for path in self._files:
            whole = path.with_name(f"{path.name}.part")
            whole.write_text(told)
            whole.replace(path)  # who is killed here leaves the rows before

    def log(self, name: str, told: str) -> None:
        """Keep what a measurement has written to stderr, in $OUT."""
        if (out := os.environ.get("OUT")) and told:
            with (Path(out) / "gpu_check.log").open("a") as file:
                file.write(f"== {name}\n{told}\n")

    def table(self) -> str:
        head = [("figure", "bar", "number", "")]
        body = [
            (row.figure, row.bar or "-", ", ".join(filter(None, (row.number, row.reason))), self._verdict(row))
            for row in self.rows
        ]
        widths = [max(len(line[column]) for line in head + body) for column in range(2)]
        width = max([len(line[2]) for line in body if len(line[2]) < 100], default=0)
        lines = [
            f"{figure:{widths[0]}}  {bar:{widths[1]}}  {number:{width}}  {verdict}".rstrip()
            for figure, bar, number, verdict in head + body
        ]
        title = ["REHEARSAL: these numbers are no figures, only proof that the code runs"] if self._is_rehearsal else []
        return "\n".join([*title, *(f"{name}: {value}" for name, value in self._hardware.items()), "", *lines])

    def json(self) -> str:
        rows = [{**asdict(row), "status": self._verdict(row)} for row in self.rows]
        told = {"rehearsal": self._is_rehearsal, "seconds": round(time.monotonic() - self._begin, 1)}
        return json.dumps({**told, "hardware": self._hardware, "rows": rows}, indent=1)

    def summary(self) -> str:
        """Count the rows of each kind."""
        counts = Counter(self._verdict(row) for row in self.rows)
        return ", ".join(f"{n} {status}" for status, n in counts.items())

    def _verdict(self, row: Row) -> str:
        return "rehearsed" if self._is_rehearsal and row.status in ("met", "NOT MET", "measured") else row.status

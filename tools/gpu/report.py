"""The one table, and the same as JSON, also under $OUT: written anew after each row, so that nothing is lost whatever happens."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from gpu.bench import Row


class Report:
    """Rows as they come, and what they were measured on."""

    def __init__(self, hardware: dict[str, str], is_rehearsal: bool) -> None:
        self.rows: list[Row] = []
        self._hardware = hardware
        self._is_rehearsal = is_rehearsal
        out = os.environ.get("OUT")
        self._copy = Path(out) / "gpu_check.json" if out else None

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(f"  {row.figure}: {row.number or 'NOT MEASURED: ' + row.reason}", flush=True)
        if self._copy is not None:
            self._copy.write_text(self.json())

    def table(self) -> str:
        head = [("figure", "bar", "number", "")]
        body = [
            (row.figure, row.bar or "-", row.number or f"not measured: {row.reason}", self._verdict(row))
            for row in self.rows
        ]
        widths = [max(len(line[column]) for line in head + body) for column in range(2)]
        width = max([len(row.number) for row in self.rows], default=0)
        lines = [
            f"{figure:{widths[0]}}  {bar:{widths[1]}}  {number:{width}}  {verdict}".rstrip()
            for figure, bar, number, verdict in head + body
        ]
        title = (
            ["REHEARSAL on a CPU: these numbers are no figures, only proof that the code runs"]
            if self._is_rehearsal
            else []
        )
        return "\n".join([*title, *(f"{name}: {value}" for name, value in self._hardware.items()), "", *lines])

    def json(self) -> str:
        rows = [asdict(row) for row in self.rows]
        return json.dumps({"rehearsal": self._is_rehearsal, "hardware": self._hardware, "rows": rows}, indent=1)

    def _verdict(self, row: Row) -> str:
        return "" if row.met is None or self._is_rehearsal else "met" if row.met else "NOT MET"

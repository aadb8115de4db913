"""The table of benchmarks: what tools/bench_all measures, by which command, and the bar of each figure.

Commands are short forms where the whole takes more than some three minutes: fewer steps, kills, pairs or rows. Those that
need no comparison with the training in memory leave it out; the limit is then that of the drive's bytes. Bytes that a
snapshot copies are those that steps with one write more than others, which differ by what is in flight: a copy would be 100 %.
"""

# ruff: noqa: RUF001  # the sign of multiplication in bars

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from processes import PEERS_PYTHON

MB = 10**6
SHORT = {
    "T": "tools/bench_train --read-cap 500MB --write-cap 500MB",
    "F": "tools/bench_infer --read-cap 500MB",
}
"""First words of commands, and what they stand for in the table."""


@dataclass(frozen=True)
class Figure:
    """A figure and its bar.

    `value` and `also`, seconds that are shown with it, are names of READ for the row's tool; ROW.NAME is another row's, and
    "A / B" a quotient. `bar` begins with the number that the value may have at most; at least, with `at_least`.
    """

    value: str
    bar: str
    shown: str = "{:.3f}"
    also: str = ""
    at_least: bool = False

    def is_met(self, value: float) -> bool:
        limit = float(re.match(r"[\d.,]+", self.bar)[0].replace(",", ""))  # type: ignore[index]
        return value >= limit if self.at_least else value <= limit


@dataclass(frozen=True)
class Row:
    """`minutes`: expected, on two quiet cores; `needs`: a name of NEEDS, without which the row cannot be measured."""

    name: str
    what: str
    command: str
    minutes: float
    figures: tuple[Figure, ...]
    needs: str = ""

    @property
    def words(self) -> list[str]:
        first, *others = self.command.split()
        return [*SHORT.get(first, first).split(), *others]

    @property
    def tool(self) -> str:
        return Path(self.words[0]).name


NEEDS: dict[str, tuple[str, Callable[[], object]]] = {
    "DeepSpeed": ("DeepSpeed is not installed: tools/setup peers", PEERS_PYTHON.exists),
    "fio": ("fio is not installed", lambda: shutil.which("fio")),
    "GPU": ("there is no GPU in this machine", Path("/dev/nvidia0").exists),
}
"""What this machine may lack: the reason in words, and whether it is here."""


def errors(found: list[dict[str, Any]], what: str) -> list[float]:
    """Return how far the predictions of tools/bench_plan are from what was measured, in %."""
    pairs = [(row[f"predicted_{what}"], row[f"measured_{what}"]) for row in found]
    return [
        100 * (abs(predicted / measured - 1) if measured else float(predicted > 0)) for predicted, measured in pairs
    ]


def load_cpu_s(found: dict[str, Any]) -> float:
    """Return CPU seconds a GB of loading swapper's file."""
    return float(next(way["cpu_s_per_gb"] for way in found["ways"] if (way["kind"], way["way"]) == ("load", "swapper")))


def kills(output: str) -> int:
    """Return the kills that tools/test_crashes counts at its end, when all runs were exact."""
    return int(re.findall(r"^(\d+) kills, .* all exact$", output, re.MULTILINE)[-1])


READ: dict[str, dict[str, Callable[[Any], float]]] = {
    "bench_train": {
        "ratio": lambda of: of["ratio"],
        "step_s": lambda of: of["swapped"]["step_s"],
        "peak_mb": lambda of: of["swapped"]["growth_bytes"] / MB,
        "rank_mb": lambda of: max(rank["growth_bytes"] for rank in of["swapped"]["by_rank"]) / MB,
        "torch_s": lambda of: of["reference"]["step_s"],
        "torch_mb": lambda of: of["reference"]["growth_bytes"] / MB,
        "deepspeed_s": lambda of: of["deepspeed"]["step_s"],
        "deepspeed_mb": lambda of: of["deepspeed"]["growth_bytes"] / MB,
    },
    "bench_infer": {
        "ratio": lambda of: of["ratio"],
        "together_s": lambda of: of["together_s"],
        "pass_s": lambda of: of["swapped"]["pass_s"],
        "first_ratio": lambda of: of["first_ratio"],
        "first_s": lambda of: of["first_s"],
        "peak_mb": lambda of: of["swapped"]["growth_bytes"] / MB,
        "torch_s": lambda of: of["plain"]["median_pass_s"],
        "torch_mb": lambda of: of["plain"]["growth_bytes"] / MB,
        "accelerate_s": lambda of: of["accelerate"]["pass_s"],
        "accelerate_mb": lambda of: of["accelerate"]["growth_bytes"] / MB,
    },
    "bench_context": {
        "token_ratio": lambda of: of["token_ratio"],
        "token_s": lambda of: of["swapped"]["token_s"],
        "prefill_ratio": lambda of: of["prefill_ratio"],
        "open_ratio": lambda of: of["open_ratio"],
        "first_speedup": lambda of: of["first_speedup"],
        "over_mb": lambda of: of["over_budget_bytes"] / MB,
    },
    "bench_beside": {
        "ratio": lambda of: median(of["ratios"]),
        "step_s": lambda of: median(of["swapped"]["times_s"]),
    },
    "bench_plan": {
        "median": lambda of: median(errors(of, "s")),
        "worst": lambda of: max(errors(of, "s")),
        "bytes": lambda of: max(errors(of, "bytes")),
    },
    "bench_snapshot": {
        "call": lambda of: 100 * of["call_ratio"],
        "copied": lambda of: 100 * abs(of["engine_copied_bytes"]) / of["state_bytes"],
    },
    "bench_io": {
        "read": lambda of: median(of["capped"]["read"]["arena"]),
        "write": lambda of: median(of["capped"]["write"]["arena"]),
    },
    "bench_checkpoint": {"load_cpu_s": load_cpu_s},
    "test_crashes": {"kills": kills},
    "gpu_check": {"unmet": lambda of: sum(row["status"] in ("NOT MET", "NOT EQUAL", "FAILED") for row in of["rows"])},
}
"""Where each tool's figures are in its JSON, or in its output if it writes none. One whose keys are absent is not measured."""

ROWS = (
    Row("state", "Training: optimizer state on NVMe", "T --placement state --steps 4", 1.4,
        (Figure("ratio", "1.02 × limit", also="step_s"), Figure("peak_mb", "1,228 MB", "{:,.0f} MB"))),
    Row("all", "Training: parameters and state on NVMe", "T --placement all --steps 4 --no-reference", 1.2,
        (Figure("ratio", "1.06 × limit", also="step_s"), Figure("peak_mb", "796 MB", "{:,.0f} MB"))),
    Row("deferred", "Updates deferred", "T --placement all --update deferred --steps 4 --no-reference", 1.1,
        (Figure("ratio", "0.90 × limit", also="step_s"),)),
    Row("gradients", "Gradients on NVMe too, 160 MB in all", "T --placement all --gradients nvme --steps 4 --no-reference", 1.3,
        (Figure("ratio", "1.08 × limit", also="step_s"),)),
    Row("8bit", "State in 8 bits, updates in backward", "T --placement state --codec 8bit --update backward --steps 4", 0.9,
        (Figure("ratio", "1.10 × limit of 3.125·P", also="step_s"),
         Figure("state.step_s / step_s", "3.4 × faster", "{:.2f} ×", at_least=True))),
    Row("split", "State split without loss", "T --placement state --codec split --steps 4 --no-reference", 1.0,
        (Figure("ratio", "1.03 × limit", also="step_s"),)),
    Row("bf16", "Moments in bf16, masters split, updates in backward",
        "T --placement state --codec bf16 --update backward --steps 4 --no-reference", 0.8,
        (Figure("ratio", "1.05 × limit", also="step_s"),)),
    Row("micro-16", "Eight micro-batches together, of 16 tokens",
        "T --placement all --accumulate 8 --update backward --context 16 --steps 3 --no-reference", 1.2,
        (Figure("ratio", "1.06 × limit", also="step_s"),)),
    Row("micro-128", "The same, of 128 tokens, with 320 MB of pool",
        "T --placement all --accumulate 8 --update backward --pool 320MB --steps 3 --warmup 2 --no-reference", 1.3,
        (Figure("ratio", "1.06 × limit", also="step_s"),)),
    Row("muon", "Muon for matrices, AdamW for the rest",
        "T --placement all --optimizers muon --update deferred --steps 3 --warmup 2", 2.5,
        (Figure("ratio", "1.05 × limit", also="step_s"),)),
    Row("ranks", "Two ranks of FSDP2, updates in backward",
        "T --ranks 2 --placement all --update backward --steps 3 --no-reference", 1.3,
        (Figure("ratio", "1.06 × limit", also="step_s"), Figure("rank_mb", "901 MB a rank", "{:,.0f} MB"))),
    Row("ranks-deferred", "The same, deferred",
        "T --ranks 2 --placement all --update deferred --steps 3 --no-reference", 1.4,
        (Figure("ratio", "1.06 × limit", also="step_s"), Figure("rank_mb", "901 MB a rank", "{:,.0f} MB"))),
    Row("deepspeed", "Against DeepSpeed ZeRO-3, pipelined",
        "T --placement state --pool 512MB --deepspeed --steps 4 --no-reference", 2.5,
        (Figure("deepspeed_s / step_s", "2.2 × faster", "{:.2f} ×", also="step_s", at_least=True),
         Figure("peak_mb", "1,898 MB", "{:,.0f} MB")), needs="DeepSpeed"),
    Row("beside", "Computing long, against plain torch, bf16", "tools/bench_beside --batch 12 --pool 512MB", 2.2,
        (Figure("ratio", "1.05 × plain torch", also="step_s"),)),
    Row("plan", "Predicted and measured seconds, bytes: 9 of the 30 rows",
        "tools/bench_plan --rows 20M --rows 60M-200-infer", 3.3,
        (Figure("median", "5 % (median)", "{:.1f} %"), Figure("worst", "12 % (worst)", "{:.1f} %"),
         Figure("bytes", "3 % (bytes)", "{:.1f} %"))),
    Row("infer", "Inference: a pass, 300 MB of memory", "F --host-memory 300MB", 1.3,
        (Figure("ratio", "1.02 × limit", also="pass_s"),)),
    Row("infer-all", "Inference: memory for all weights", "tools/bench_infer --host-memory all --passes 30", 0.9,
        (Figure("pass_s / torch_s", "1.02 × plain torch", also="pass_s"),)),
    Row("infer-uncapped", "Inference uncapped, 300 MB: first output; a pass against accelerate's disk_offload",
        "tools/bench_infer --host-memory 300MB --accelerate --cold 9", 1.9,
        (Figure("first_ratio", "1.1 × the drive's time", also="first_s"),
         Figure("accelerate_s / pass_s", "2 × faster", "{:.1f} ×", also="pass_s", at_least=True))),
    Row("int8", "Weights in 8 bits", "F --host-memory 300MB --quantize int8 --no-plain", 1.1,
        (Figure("infer.pass_s / pass_s", "2 × faster", "{:.2f} ×", also="pass_s", at_least=True),)),
    Row("int4", "Weights in 4 bits", "F --host-memory 300MB --quantize int4 --no-plain", 1.1,
        (Figure("infer.pass_s / pass_s", "4 × faster", "{:.2f} ×", also="pass_s", at_least=True),)),
    Row("clients", "8 threads that generate, against one after the other", "F --host-memory 300MB --clients 8", 2.7,
        (Figure("ratio", "6 × as many tokens a second", "{:.1f} ×", also="together_s", at_least=True),)),
    Row("context", "4.3 GB of keys and values in 1 GB", "tools/bench_context --read-cap 500MB --write-cap 500MB", 3.7,
        (Figure("token_ratio", "1.05 × the bytes (a token)", also="token_s"),
         Figure("prefill_ratio", "1.05 × limit (prefill)"), Figure("open_ratio", "1.1 × the bytes (opened)"),
         Figure("first_speedup", "5 × sooner than a prefill", "{:.1f} ×", at_least=True),
         Figure("over_mb", "100 MB over the budget", "{:,.0f} MB"))),
    Row("snapshot", "`snapshot()` returns; bytes copied", "tools/bench_snapshot --steps 4 --read-cap 500MB --write-cap 500MB", 1.9,
        (Figure("call", "1 % of a step", "{:.2f} %"), Figure("copied", "5 % of the state", "{:.1f} %"))),
    Row("kills", "Kills at random instants, resumed bit for bit", "tools/test_crashes kills 100", 1.0,
        (Figure("kills", "100 of 100", "{} of 100", at_least=True),)),
    Row("io", "I/O engine, read and written under the cap, of fio",
        "tools/bench_io . --only capped --seconds 3 --pairs 3", 1.8,
        (Figure("read", "0.98 (read)", at_least=True), Figure("write", "0.98 (written)", at_least=True)), needs="fio"),
    Row("checkpoint", "Loads of a checkpoint into cold memory: CPU time",
        "tools/bench_checkpoint --cap 500MB --size 2GB --only swapper", 1.2,
        (Figure("load_cpu_s", "0.15 s a GB", "{:.2f}"),)),
    Row("gpu", "Everything on a GPU", "tools/gpu_check", 8.0,
        (Figure("unmet", "0 bars not met", "{}"),), needs="GPU"),
)  # fmt: skip

CHARTS = (
    ("A training step: 168M-parameter GPT, bf16, AdamW, drive held at 500 MB/s", (
        ("torch, all in memory", "state.torch_s", "state.torch_mb"),
        ("swapper, state on NVMe", "state.step_s", "state.peak_mb"),
        ("swapper, parameters too", "all.step_s", "all.peak_mb"),
        ("DeepSpeed ZeRO-3, state on NVMe", "deepspeed.deepspeed_s", "deepspeed.deepspeed_mb"),
    )),
    ("A pass of inference: 1.34B-parameter GPT, bf16, drive held at 500 MB/s", (
        ("torch, all in memory", "infer.torch_s", "infer.torch_mb"),
        ("swapper, 300 MB", "infer.pass_s", "infer.peak_mb"),
    )),
    ("The same at the drive's own speed, cold", (
        ("swapper, 300 MB", "infer-uncapped.pass_s", "infer-uncapped.peak_mb"),
        ("accelerate disk_offload", "infer-uncapped.accelerate_s", "infer-uncapped.accelerate_mb"),
    )),
)  # fmt: skip
"""The charts of docs/assets/peers.svg: a title, and bars of (name, seconds, MB)."""

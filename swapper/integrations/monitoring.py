"""Sends the statistics of each step to where people look: files and endpoints for Prometheus, TensorBoard, W&B, Trainers.

All have the numbers of `manager.stats().as_dict()`. The libraries are imported when they are used.

    write_openmetrics(manager, "/var/lib/node_exporter/textfile/swapper.prom")
    log_to_tensorboard(manager, "runs/first")
    log_to_trainer(manager, trainer)
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any

from swapper.errors import ConfigError
from swapper.io.replacing import temporary_name
from swapper.manager import SwapManager
from swapper.runtime.stats import PHASES, StepStats

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
BEGINNING = "# TYPE swapper_"
"""The beginning of each text of metrics, by which a file is known as ours."""

End = Callable[[], None]
"""Ends what the function that returned it began."""


def scalars(stats: StepStats) -> dict[str, float]:
    """Return the numbers of `stats.as_dict()` that are known, named "swapper/wall_s"."""
    return {f"swapper/{name}": value for name, value in stats.as_dict().items() if value is not None and name != "step"}


# --- Prometheus ---------------------------------------------------------------------------------------------------------


def openmetrics(manager: SwapManager, labels: Mapping[str, str] | None = None) -> str:
    """Return the manager's metrics as OpenMetrics text, which Prometheus reads.

    Counters since the start (swapper_steps_total, swapper_read_bytes_total{family=}, swapper_wait_seconds_total{for=}, ...),
    gauges of the last step (swapper_step_seconds{phase=}, swapper_step_limit_seconds, ...) and of memory.

    Args:
        labels: of each metric, in addition: {"job": "pretraining"}.
    """
    counters, stats = manager.counters.snapshot(), manager.stats()
    text = _Text(labels or {})
    text.add("steps", "counter", {"": counters["step"]}, "optimizer steps taken")
    for verb in ("read", "written"):
        text.add(f"{verb}_bytes", "counter", counters[f"{verb}_bytes"], "bytes moved", "family")
    waits = {kind: counters[f"{kind}_wait_s"] for kind in ("read", "write", "frame", "rank")}
    text.add("wait_seconds", "counter", waits, "time waiting", "for")
    text.add("update_seconds", "counter", {"": counters["update_s"]}, "time in the optimizer's arithmetic")
    pages = {kind: counters[f"pages_{kind}"] for kind in ("used", "missed", "awaited")}
    text.add("pages", "counter", pages, "pages used; of them not prefetched; of them waited for", "kind")
    sizes = {kind: counters[f"{kind}_bytes"] for kind in ("pool", "resident", "device_peak")}
    text.add("memory_bytes", "gauge", sizes, "memory that swapper holds", "kind")
    if stats.step:
        phases = {phase: stats.phases[phase].wall_s for phase in PHASES}
        text.add("step_seconds", "gauge", phases, "time of the last step", "phase")
        waiting = {phase: stats.phases[phase].wait_s for phase in PHASES}
        text.add("step_waiting_seconds", "gauge", waiting, "of it, waiting for the drive", "phase")
        if stats.limit_s is not None:
            text.add("step_limit_seconds", "gauge", {"": stats.limit_s}, "the shortest that the last step can be")
    return str(text)


class _Text:
    """OpenMetrics text of several metric families."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        for name, value in labels.items():
            if not name.isidentifier() or not name.isascii():
                raise ConfigError(f"labels={{{name!r}: ...}}: a label's name is letters, digits and underscores")
            if type(value) is not str:
                raise ConfigError(f"labels={{{name!r}: {value!r}}}: a label's value is a string")
        self._labels = dict(labels)
        self._lines: list[str] = []

    def add(self, name: str, kind: str, values: Mapping[str, float], what: str, label: str = "") -> None:
        """Add a family of metrics.

        Args:
            name: ends in its unit, if it has one.
            kind: "counter" or "gauge".
            values: by the value of `label`; of one metric without that label, by "".
        """
        unit = name.rpartition("_")[2]
        self._lines += [f"# TYPE swapper_{name} {kind}"]
        self._lines += [f"# UNIT swapper_{name} {unit}"] if unit in ("bytes", "seconds") else []
        self._lines += [f"# HELP swapper_{name} {what}"]
        for key, value in values.items():
            labels = {**self._labels, **({label: key} if label else {})}
            told = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
            suffix = "_total" if kind == "counter" else ""
            self._lines.append(f"swapper_{name}{suffix}{f'{{{told}}}' if told else ''} {value!r}")

    def __str__(self) -> str:
        return "\n".join([*self._lines, "# EOF", ""])


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def write_openmetrics(
    manager: SwapManager, path: str | os.PathLike[str], labels: Mapping[str, str] | None = None
) -> End:
    """Write a file of metrics now and after each step, for node_exporter's textfile collector.

    The file is replaced as a whole, so that nobody reads half of one.

    Args:
        manager: whose metrics.
        path: the file, or a file of metrics of swapper to replace.
        labels: see `openmetrics`.

    Returns:
        A function that ends this, and leaves the file.

    Raises:
        ConfigError: `path` is a file of something else, or cannot be written.
    """
    target = Path(path).absolute()
    if target.exists() and not (target.is_file() and _is_ours(target)):
        raise ConfigError(f"{target} exists, and is not a file of swapper's metrics: choose another name")

    def write(_: object = None) -> None:
        temporary = temporary_name(target)
        try:
            temporary.write_text(openmetrics(manager, labels))
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

    try:
        write()
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}") from error
    return manager.on_step(write)


def _is_ours(path: Path) -> bool:
    with path.open(errors="replace") as stream:
        return stream.read(len(BEGINNING)) in (BEGINNING, "")


class MetricsServer:
    """An HTTP endpoint of the manager's metrics as of the last step, for Prometheus.

    Its thread ends with `close`, or with the process.

    Args:
        manager: whose metrics.
        port: 0 chooses a free one.
        host: the address; the default is for this machine only.
        labels: see `openmetrics`.

    Attributes:
        url: of the metrics.

    Raises:
        ConfigError: the port is in use, or the address is not this machine's.
    """

    def __init__(
        self, manager: SwapManager, port: int = 0, host: str = "127.0.0.1", labels: Mapping[str, str] | None = None
    ) -> None:
        text = openmetrics(manager, labels).encode()

        def render(_: object) -> None:  # in the thread that trains: another could meet a session that is closing
            nonlocal text
            text = openmetrics(manager, labels).encode()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.partition("?")[0] not in ("/", "/metrics"):
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *arguments: object) -> None: ...

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except (OSError, OverflowError, socket.gaierror) as error:
            raise ConfigError(f"metrics cannot be served at {host}, port {port}: {error}") from error
        self.url = f"http://{host}:{self._server.server_address[1]}/metrics"
        self._remove = manager.on_step(render)
        self._thread = threading.Thread(target=self._server.serve_forever, name="swapper-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._remove()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


# --- loggers ------------------------------------------------------------------------------------------------------------


def log_to_tensorboard(manager: SwapManager, where: Any) -> End:
    """Write each step's numbers for TensorBoard.

    Args:
        where: a torch.utils.tensorboard.SummaryWriter, or a directory for a new one.

    Returns:
        A function that ends this.
    """
    if isinstance(where, str | os.PathLike):
        library = _library("log_to_tensorboard", "torch.utils.tensorboard", package="tensorboard")
        where = library.SummaryWriter(os.fspath(where))

    def write(stats: StepStats) -> None:
        for name, value in scalars(stats).items():
            where.add_scalar(name, value, stats.step)

    remove = manager.on_step(write)

    def end() -> None:
        remove()
        where.flush()

    return end


def log_to_wandb(manager: SwapManager, run: Any = None) -> End:
    """Log each step's numbers to W&B, over an axis of their own, "swapper/step".

    Args:
        run: of wandb.init; None: the present one.

    Returns:
        A function that ends this.

    Raises:
        ConfigError: there is no run.
    """
    if run is None:
        run = _library("log_to_wandb", "wandb").run
    if run is None:
        raise ConfigError("log_to_wandb needs a run: call wandb.init() before, or give it")
    run.define_metric("swapper/*", step_metric="swapper/step")
    return manager.on_step(lambda stats: run.log({"swapper/step": stats.step, **scalars(stats)}))


def log_to_trainer(manager: SwapManager, trainer: Any) -> None:
    """Add each logged step's numbers to the logs of a transformers Trainer, and so to what its report_to= names.

    Args:
        trainer: transformers', or one derived from it.
    """
    base = _library("log_to_trainer", "transformers").TrainerCallback

    def on_log(self: Any, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        if logs is not None and "loss" in logs and manager.stats().step:
            found = scalars(manager.stats())
            logs.update(found)
            state.log_history[-1].update(found)

    callback = type("SwapperCallback", (base,), {"on_log": on_log})()
    trainer.callback_handler.callbacks.insert(0, callback)  # before those that report


def lightning_callback(manager: Callable[[], SwapManager] | SwapManager) -> Any:
    """Return a callback for a Lightning Trainer that logs each step's numbers to its loggers.

    Args:
        manager: the manager, or a function that returns it once `configure_optimizers` has made it.
    """
    base = _library("lightning_callback", "lightning.pytorch", "pytorch_lightning", package="lightning").Callback

    def on_train_batch_end(self: Any, trainer: Any, module: Any, *arguments: Any) -> None:
        stats = (manager if isinstance(manager, SwapManager) else manager()).stats()
        if stats.step:
            module.log_dict({name: float(value) for name, value in scalars(stats).items()})

    return type("SwapperCallback", (base,), {"on_train_batch_end": on_train_batch_end})()


def _library(user: str, *modules: str, package: str = "") -> Any:
    """Return the first of `modules` that is installed."""
    for name in modules:
        with suppress(ImportError):
            return import_module(name)
    package = package or modules[0]
    raise ConfigError(f"{user} needs {package}: pip install {package}")

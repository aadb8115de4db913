"""The numbers of a run where people look: printed, as a dictionary, for Prometheus, TensorBoard, W&B and Trainers, in the log."""

from __future__ import annotations

import json
import logging
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from devices import NAME as DEVICE
from torch import nn

import swapper
from e2e.models import layers, layers_step
from e2e.twins import Twins
from swapper.integrations import monitoring
from swapper.io.drives import Tuning, keep_tuning
from swapper.runtime.stats import IN_A_ROW, WARM_UP, LimitWatch

MakeTwins = Callable[..., Twins]
NAMES = Path(__file__).with_name("stats_names.txt")
UNITS = ("_s", "_bytes", "_ratio", "pages_used", "pages_missed", "pages_awaited", "step")


def trained(twins: MakeTwins) -> Twins:
    pair = twins(layers())
    pair.train(layers_step, steps=1)
    return pair


def manager_of(pair: Twins) -> swapper.SwapManager:
    assert pair.manager is not None
    return pair.manager


def test_the_dictionary_has_stable_flat_names_with_units(twins: MakeTwins) -> None:
    """The names are in a file: a change of it breaks users' dashboards. Adding some does not."""
    run = trained(twins)
    stats = manager_of(run).stats()
    found = stats.as_dict()
    assert set(NAMES.read_text().split()) <= set(found)
    assert all(name.endswith(UNITS) for name in found)
    assert all(value is None or type(value) in (int, float) for value in found.values())
    json.dumps(found, allow_nan=False)
    assert found["wall_s"] == stats.wall_s
    assert (
        found["read_bytes"]
        == stats.read_bytes
        == sum(found[f"{f}_read_bytes"] or 0 for f in ("param", "state", "grad"))
    )
    assert found["backward_read_bytes"] == sum(stats.phases["backward"].read_bytes.values())
    assert (found["drive_s"], found["limit_ratio"]) == (None, None), "the drive was not tuned"


def test_a_manager_is_printed_in_a_few_lines(twins: MakeTwins) -> None:
    pair = twins(layers(), wait=True)
    empty = pair.make_manager()
    assert "no model yet: call manager.offload" in str(empty)
    empty.close()
    assert "the manager is closed" in str(empty)
    pair.offload()
    manager = manager_of(pair)
    assert "none in this process" in str(manager)
    pair.train(layers_step, steps=1)
    lines = str(manager).splitlines()
    assert len(lines) <= 10
    of_device = ["device memory", "updates"] if DEVICE else []
    assert [line.split("  ")[0] for line in lines] == [
        "directory", "condition", "model", "parameters", "optimizer state", "gradients", "host memory", *of_device, "last step",
    ]  # fmt: skip
    assert str(manager._directory.path) in lines[0]
    assert "Sequential" in lines[2] and "AdamW" in lines[2]
    assert lines[3].endswith("on nvme")
    assert re.search(r"last step +1: \d+\.\d\d s, ", lines[-1])
    pair.both(lambda model, optimizer: optimizer.zero_grad())
    with manager.parked():
        assert "the manager is parked" in str(manager)


def test_the_log_says_at_start_what_was_chosen_and_why(twins: MakeTwins, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "swapper")
    pair = twins(layers(), budget=64 << 20, params="auto", optimizer_state="nvme")
    said = {line.split(": ")[1]: line for line in caplog.messages if line.startswith("offload: ")}
    assert "on host, since it fits host_memory" in said["params"]
    assert "on nvme, as optimizer_state='nvme' says" in said["optimizer_state"]
    assert "some of what a step changes stays in memory" in said["commits"]
    assert "run `swapper tune DIR`" in said["drive"]
    assert "of 64.0 MiB" in said["host memory"]
    caplog.clear()
    with manager_of(pair).parked():
        pass
    assert not [line for line in caplog.messages if line.startswith("offload: ")]


def test_a_slow_step_is_said_once(
    twins: MakeTwins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """By a tuning that says that the drive takes no time, and waits that are counted as if all of a step was waiting."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    keep_tuning(tmp_path, Tuning(1 << 20, 8, "threads", 1e15, 1e15))
    pair = twins(layers())
    manager = manager_of(pair)

    def step(model: Any, optimizer: Any) -> torch.Tensor:
        if model is pair.swapped:
            manager._counters.read_wait_s += 1e6
        return layers_step(model, optimizer)

    pair.train(step, steps=WARM_UP + IN_A_ROW + 2)
    (said,) = [line for line in caplog.messages if "times its limit" in line]
    assert said.startswith(f"step {WARM_UP + IN_A_ROW} took ")
    assert "it waits" in said and "for reads" in said and "host_memory=" in said


def test_steps_that_are_slow_now_and_then_are_not_said(caplog: pytest.LogCaptureFixture) -> None:
    watch = LimitWatch()
    for number in range(30):
        watch(SimpleNamespace(step=number, limit_ratio=9.0 if number % IN_A_ROW else 1.0))
    watch(SimpleNamespace(step=31, limit_ratio=None))
    assert caplog.messages == []


def test_an_observer_that_fails_does_not_fail_the_step(twins: MakeTwins, caplog: pytest.LogCaptureFixture) -> None:
    run = trained(twins)
    seen: list[int] = []

    def fail(stats: swapper.StepStats) -> None:
        seen.append(stats.step)
        raise OSError("the disk is full")

    end = manager_of(run).on_step(fail)
    run.train(layers_step, steps=3)
    assert seen == [2, 3, 4]
    assert len([line for line in caplog.messages if "the disk is full" in line]) == 1
    end()
    end()
    run.train(layers_step, steps=1)
    assert seen == [2, 3, 4]


def samples(text: str) -> dict[str, float]:
    """Return the values of an OpenMetrics text, by name and labels, checked as far as we can without the parser."""
    assert text.endswith("# EOF\n")
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            assert re.fullmatch(r'[a-z_]+(\{([a-z_]+="[^"]*",?)+\})?', name), line
            assert name not in found
            found[name] = float(value)
    return found


def test_a_file_for_prometheus_is_replaced_after_each_step(twins: MakeTwins, tmp_path: Path) -> None:
    run = trained(twins)
    manager, path = manager_of(run), tmp_path / "swapper.prom"
    end = monitoring.write_openmetrics(manager, path, {"job": 'a "b"'[:1]})
    first = samples(path.read_text())
    assert first['swapper_steps_total{job="a"}'] == 1
    with path.open() as before:
        run.train(layers_step, steps=2)
        assert samples(before.read()) == first, "replaced, not written into: who has it open reads all of the old one"
    now = samples(path.read_text())
    assert [file.name for file in tmp_path.iterdir() if file.name.endswith(".partial")] == []
    assert now['swapper_steps_total{job="a"}'] == 3
    read = manager.counters.read_bytes["param"]
    assert now['swapper_read_bytes_total{job="a",family="param"}'] == read > 0
    assert now['swapper_step_seconds{job="a",phase="forward"}'] == manager.stats().phases["forward"].wall_s
    end()
    run.train(layers_step, steps=1)
    assert samples(path.read_text()) == now
    monitoring.write_openmetrics(manager, path)  # ours: it may be replaced


def test_what_prometheus_reads_is_what_its_parser_reads(twins: MakeTwins) -> None:
    run = trained(twins)
    parser = pytest.importorskip("prometheus_client.openmetrics.parser", reason="prometheus_client is not installed")
    families = {f.name: f for f in parser.text_string_to_metric_families(monitoring.openmetrics(manager_of(run)))}
    assert families["swapper_steps"].type == "counter"
    assert families["swapper_step_seconds"].unit == "seconds"
    assert {sample.labels["family"] for sample in families["swapper_written_bytes"].samples} == {
        "param",
        "state",
        "grad",
    }


@pytest.mark.parametrize(
    ("labels", "match"), [({"a b": "c"}, "a label's name"), ({"a": 1}, "a label's value is a string")]
)
def test_bad_labels_are_named(twins: MakeTwins, tmp_path: Path, labels: dict[str, Any], match: str) -> None:
    run = trained(twins)
    with pytest.raises(swapper.ConfigError, match=match):
        monitoring.write_openmetrics(manager_of(run), tmp_path / "x.prom", labels)
    with pytest.raises(swapper.ConfigError, match=match):
        monitoring.MetricsServer(manager_of(run), labels=labels)
    assert not (tmp_path / "x.prom").exists()


def test_a_users_file_is_not_replaced(twins: MakeTwins, tmp_path: Path) -> None:
    run = trained(twins)
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(swapper.ConfigError, match=r"notes\.txt exists, and is not a file of swapper's metrics"):
        monitoring.write_openmetrics(manager_of(run), path)
    assert path.read_text() == "mine"
    with pytest.raises(swapper.ConfigError, match="cannot be written: No such file or directory"):
        monitoring.write_openmetrics(manager_of(run), tmp_path / "absent" / "x.prom")


def test_an_endpoint_serves_the_last_step_also_while_parked(twins: MakeTwins) -> None:
    run = trained(twins)
    manager = manager_of(run)
    server = monitoring.MetricsServer(manager)
    try:
        run.train(layers_step, steps=1)
        run.both(lambda model, optimizer: optimizer.zero_grad())
        with manager.parked(), urllib.request.urlopen(server.url) as answer:
            assert answer.headers["Content-Type"] == monitoring.CONTENT_TYPE
            assert samples(answer.read().decode())["swapper_steps_total"] == 2
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(server.url + "/other")
        with pytest.raises(swapper.ConfigError, match="metrics cannot be served at 127"):
            monitoring.MetricsServer(manager, port=int(server.url.split(":")[2].split("/")[0]))
    finally:
        server.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(server.url)


def test_tensorboard_has_the_same_numbers(twins: MakeTwins, tmp_path: Path) -> None:
    run = trained(twins)
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    manager = manager_of(run)
    end = monitoring.log_to_tensorboard(manager, tmp_path / "logs")
    run.train(layers_step, steps=2)
    end()
    events = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    for name, value in monitoring.scalars(manager.stats()).items():
        last = events.Scalars(name)[-1]
        assert (last.step, last.value) == (3, pytest.approx(value)), name


def test_wandb_has_the_same_numbers(twins: MakeTwins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(twins)
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    with pytest.raises(swapper.ConfigError, match=r"call wandb\.init\(\) before"):
        monitoring.log_to_wandb(manager_of(run))
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=str(tmp_path), project="test") as its_run:
        end = monitoring.log_to_wandb(manager_of(run))
        run.train(layers_step, steps=2)
        end()
        summary = dict(its_run.summary)
    assert summary["swapper/step"] == 3
    for name, value in monitoring.scalars(manager_of(run).stats()).items():
        assert summary[name] == pytest.approx(value), name


def test_a_trainer_reports_them_with_its_own(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=128, n_positions=32)
    model = transformers.GPT2LMHeadModel(config)
    words = [torch.randint(0, 128, (16,)) for _ in range(8)]
    told: list[dict[str, Any]] = []

    class Reporter(transformers.TrainerCallback):  # type: ignore[misc]
        def on_log(self, *arguments: Any, logs: Any = None, **others: Any) -> None:
            told.append(dict(logs))

    with swapper.SwapManager(tmp_path / "run", host_memory="32MiB") as manager:
        model, optimizer = manager.offload(model, torch.optim.AdamW(model.parameters()), params="nvme")
        trainer = transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(
                tmp_path / "out",
                max_steps=2,
                logging_steps=1,
                report_to=[],
                use_cpu=True,
                per_device_train_batch_size=2,
            ),
            train_dataset=[{"input_ids": word, "labels": word} for word in words],
            optimizers=(optimizer, None),
            callbacks=[Reporter()],
        )
        monitoring.log_to_trainer(manager, trainer)
        trainer.train()
        assert [logs["swapper/pages_used"] > 0 for logs in told if "loss" in logs] == [True, True]
        assert told[1]["swapper/wall_s"] == manager.stats().wall_s
        assert trainer.state.log_history[1]["swapper/wall_s"] == manager.stats().wall_s


def test_lightning_logs_them(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from lightning.pytorch.loggers import CSVLogger

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(self.layers(batch), torch.zeros_like(batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            _, optimizer = manager.offload(self.layers, torch.optim.AdamW(self.layers.parameters()), params="nvme")
            return optimizer  # type: ignore[no-any-return]

    with swapper.SwapManager(tmp_path / "run", host_memory="32MiB") as manager:
        trainer = lightning.Trainer(
            max_steps=3, accelerator="cpu", logger=CSVLogger(tmp_path), log_every_n_steps=1, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
            callbacks=[monitoring.lightning_callback(lambda: manager)],
        )  # fmt: skip
        width = next(manager_layer.in_features for manager_layer in layers() if isinstance(manager_layer, nn.Linear))
        trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(6, width), batch_size=2))
        assert trainer.callback_metrics["swapper/read_bytes"] == manager.stats().read_bytes
    (path,) = tmp_path.rglob("metrics.csv")
    assert "swapper/wall_s" in path.read_text().splitlines()[0]


def test_any_writer_run_and_callback_get_the_same_numbers(twins: MakeTwins, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what they have of TensorBoard, W&B and Lightning: these themselves are above, where they are installed."""
    run = trained(twins)
    manager = manager_of(run)
    written: dict[int, dict[str, float]] = {}
    flushed: list[bool] = []
    writer = SimpleNamespace(
        add_scalar=lambda name, value, step: written.setdefault(step, {}).update({name: value}),
        flush=lambda: flushed.append(True),
    )
    logged: list[dict[str, float]] = []
    axes: list[tuple[str, str]] = []
    of_wandb = SimpleNamespace(
        define_metric=lambda name, step_metric: axes.append((name, step_metric)), log=logged.append
    )
    ends = [monitoring.log_to_tensorboard(manager, writer), monitoring.log_to_wandb(manager, of_wandb)]
    monkeypatch.setitem(sys.modules, "lightning.pytorch", SimpleNamespace(Callback=object))  # type: ignore[arg-type]
    shown: list[dict[str, float]] = []
    callback = monitoring.lightning_callback(lambda: manager)
    run.train(layers_step, steps=2)
    callback.on_train_batch_end(None, SimpleNamespace(log_dict=shown.append), None, None, 0)
    expected = monitoring.scalars(manager.stats())
    assert sorted(written) == [2, 3] and written[3] == expected
    assert axes == [("swapper/*", "swapper/step")] and len(logged) == 2
    assert logged[-1] == {"swapper/step": 3, **expected} and shown == [expected]
    for end in ends:
        end()
    run.train(layers_step, steps=1)
    assert sorted(written) == [2, 3] and len(logged) == 2 and flushed == [True]
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None))  # type: ignore[arg-type]
    with pytest.raises(swapper.ConfigError, match=r"call wandb\.init\(\) before"):
        monitoring.log_to_wandb(manager)


def test_a_library_that_is_missing_is_named(twins: MakeTwins, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(twins)
    for name in ("lightning.pytorch", "pytorch_lightning", "wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(swapper.ConfigError, match="pip install lightning"):
        monitoring.lightning_callback(manager_of(run))
    with pytest.raises(swapper.ConfigError, match="pip install wandb"):
        monitoring.log_to_wandb(manager_of(run))
    with pytest.raises(swapper.ConfigError, match="pip install tensorboard"):
        monitoring.log_to_tensorboard(manager_of(run), "logs")

"""`swapper plan` predicts from a configuration alone, and says what is wrong with what it is given."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from swapper.bench.plain import GptConfig, make_gpt
from swapper.cli import app
from swapper.errors import BudgetError
from swapper.forecast.machine import KNOWN, REACHED_FLOPS, REACHED_LINK, Forecaster, Machine, Setting
from swapper.forecast.model_source import make_model
from swapper.forecast.search import (
    CODECS,
    MEMORY_SHARES,
    PASSES,
    TABLE_PAGES,
    UPDATES,
    SettingCosts,
    find_table,
    saved_for_backward,
    smallest_budget,
    undominated,
)
from swapper.io.drives import Tuning, keep_tuning
from swapper.manager import SwapManager
from swapper.paging.virtual_drive import DriveRates
from swapper.train.layout.train_placement import PREFERENCES

SMALL = GptConfig(vocabulary=512, context=32, layers=4, width=256)
GIVEN = ["--host", "24MB", "--nvme", "100MB/s,50MB/s", "--flops", "1e12", "--updates", "1e9", "--tokens", "64"]
SOURCE = "unit.test_plan_command:small_gpt"
DRIVE = DriveRates(100e6, 50e6, 150e6)
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "vocab_size": 256,
}  # fmt: skip


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).invoke(app, list(arguments))


def figures(*arguments: str) -> dict[str, Any]:
    done = run("plan", *arguments, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def small_gpt() -> nn.Module:
    """A model for `swapper plan`, which makes it on the meta device."""
    return make_gpt(SMALL, torch.get_default_dtype())


def make_model_of(config: GptConfig) -> nn.Module:
    with torch.device("meta"):
        return make_gpt(config, torch.bfloat16)


def gpt_of(layers: int) -> nn.Module:
    return make_gpt(GptConfig(vocabulary=512, context=32, layers=layers, width=256), torch.get_default_dtype())


def meta_gpt() -> nn.Module:
    return make_model(SOURCE, torch.bfloat16)


def machine(host_bytes: int, **more: Any) -> Machine:
    return Machine(host_bytes, DRIVE, flops=1e12, updates=1e9, **more)


def test_plan_predicts_a_step_from_a_models_function_alone() -> None:
    found = figures(SOURCE, *GIVEN, "--endurance", "1TB")
    assert found["places"]["state"] == "nvme" and found["bytes_are_exact"]
    assert found["step_s"] >= max(found["read_bytes"] / 100e6, found["written_bytes"] / 50e6) * 0.9
    assert sum(phase["update_s"] for phase in found["phases"].values()) == pytest.approx(
        SMALL.parameters / 1e9, rel=0.01
    )
    assert found["days_to_endurance"] * found["written_bytes_a_day_a_drive"] == pytest.approx(1e12)
    upgrades = {one["what"]: one for one in found["upgrades"]}
    assert upgrades["a drive twice as fast"]["step_s"] < 0.6 * found["step_s"]
    assert found["upgrades"] == sorted(found["upgrades"], key=lambda one: -one["saved_s"])
    assert {row["codec"] for row in found["table"]} >= {"8bit"}
    assert found["planned_in_s"] > 0
    text = run("plan", SOURCE, *GIVEN).stdout
    assert "optimizer state" in text and "a drive twice as fast" in text and "no other beats" in text


def two_layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(2)))


def test_a_forecast_is_told_in_words_and_tables() -> None:
    """Of a larger model its numbers are looked at: above."""
    given = [*GIVEN, "--host", "12MB", "--endurance", "1TB"]
    done = run("plan", "unit.test_plan_command:two_layers", *given)
    assert done.exit_code == 0, done.output
    for words in ("optimizer state", "What would be faster", "no other beats in all three", "it never wears out"):
        assert words in done.stdout, done.stdout
    without = run("plan", "unit.test_plan_command:two_layers", *given, "--no-table").stdout
    assert "What would be faster" in without and "no other beats" not in without


def test_the_smallest_memory_that_is_named_works_and_less_does_not() -> None:
    forecaster = Forecaster(meta_gpt(), 64)
    smallest = smallest_budget(forecaster, machine(1 << 30), Setting())
    forecaster.plan(machine(smallest), Setting())
    with pytest.raises(BudgetError):
        forecaster.plan(machine(smallest - (2 << 20)), Setting())


def test_a_step_moves_what_the_plan_says_and_one_of_larger_pages_nearly_that() -> None:
    forecaster = Forecaster(meta_gpt(), 64)
    for update, host_bytes in (("step", 24 << 20), ("deferred", 24 << 20), ("step", 16 << 20)):
        exact = forecaster.forecast(machine(host_bytes), Setting(update=update))
        plan = forecaster.plan(machine(host_bytes), Setting(update=update))
        assert exact.exact
        assert (exact.read_bytes, exact.written_bytes) == (
            plan.traffic.total_read_bytes,
            plan.traffic.total_written_bytes,
        )
        rough = forecaster.forecast(machine(host_bytes), Setting(update=update), pages=60)
        assert not rough.exact and rough.plan.budget.page_bytes > plan.budget.page_bytes
        assert rough.written_bytes == pytest.approx(exact.written_bytes, rel=0.1)
        assert rough.step.wall_s == pytest.approx(exact.step.wall_s, rel=0.1)


@pytest.mark.parametrize("codec", ["exact", "8bit"])
def test_a_forecast_has_the_plan_that_offload_carries_out(codec: str, tmp_path: Path) -> None:
    forecaster = Forecaster(meta_gpt(), 64)
    for host_bytes, update in ((24 << 20, "step"), (48 << 20, "deferred"), (24 << 20, "deferred")):
        found = forecaster.plan(machine(host_bytes), Setting(codec=codec, update=update))
        model = meta_gpt()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with SwapManager(tmp_path / f"{host_bytes}-{update}", host_memory=host_bytes) as manager:
            plan = manager.plan(
                model, optimizer, master_weights=torch.float32, state_codec=codec, update=update
            )  # fmt: skip
            assert (found.places, found.budget, found.traffic) == (plan.places, plan.budget, plan.traffic)
            assert (found.space_bytes, found.commit_bytes) == (plan.space_bytes, plan.commit_bytes)


def test_each_pass_reads_parameters_again_and_updates_once() -> None:
    forecaster = Forecaster(meta_gpt(), 64)
    for update in ("step", "deferred", "backward"):
        setting = Setting(update=update, params="nvme", optimizer_state="nvme", gradients="nvme")
        on = machine(smallest_budget(forecaster, machine(1 << 30), setting))
        one, three = (forecaster.forecast(on, replace(setting, passes=passes)).step for passes in (1, 3))
        assert three.total.update_s == pytest.approx(one.total.update_s)
        more = three.total.read_bytes["param"] - one.total.read_bytes["param"]
        parameter_bytes = 2 * SMALL.parameters
        assert 2 * parameter_bytes < more <= 4.2 * parameter_bytes, update
        assert three.total.read_bytes["grad"] > one.total.read_bytes["grad"]


def test_ranks_share_a_model_and_their_nodes_drives() -> None:
    common = ["--nvme", "100MB/s,50MB/s", "--flops", "1e12", "--updates", "1e9", "--tokens", "64", "--no-table"]
    one = figures(SOURCE, "--host", "32MB", *common, "--dtype", "float32")
    four = figures(SOURCE, "--host", "32MB", *common, "--ranks", "4", "--nodes", "4")
    assert four["written_bytes"] < 0.3 * one["written_bytes"]
    assert any("network takes no time" in said for said in four["assumed"])
    refused = run("plan", SOURCE, "--host", "8MB", *common, "--ranks", "4")
    assert refused.exit_code == 1 and "of each of a node's 4 ranks" in refused.output
    slow = figures(SOURCE, "--host", "32MB", *common, "--ranks", "4", "--nodes", "4", "--network", "1MB/s")
    gathered_s = 3 * SMALL.parameters / 4 * 2 / 1e6  # by a rank, from three others, in a forward; a backward takes two
    assert slow["step_s"] >= 3 * gathered_s


@pytest.mark.parametrize("update_on", ["device", "cpu"])
def test_an_accelerator_waits_for_its_link(update_on: str) -> None:
    given = [*GIVEN, "--host", "96MB", "--device", "18MiB", "--no-table", "--update-on", update_on]
    fast, slow = figures(SOURCE, *given), figures(SOURCE, *given, "--link", "5MB/s")
    bytes_an_element = 12 if update_on == "device" else 2  # of state, or parameters that come back: each way at once
    assert slow["step_s"] >= max(fast["step_s"], bytes_an_element * SMALL.parameters / 5e6 * 0.9)
    assert slow["upgrades"][0]["what"] in ("a link twice as fast", "twice the device memory")


def test_a_known_accelerator_has_the_rates_of_its_data_sheet_and_says_so() -> None:
    given = [
        *GIVEN[:2],
        "--nvme",
        "100MB/s,50MB/s",
        "--updates",
        "1e9",
        "--tokens",
        "64",
        "--no-table",
        "--host",
        "96MB",
    ]
    known = figures(SOURCE, *given, "--device", "h100", "--device-memory", "18MiB")
    assert any("data sheet" in said for said in known["assumed"])
    of = KNOWN["H100"]
    same = figures(
        SOURCE, *given, "--device", "18MiB", "--flops", f"{of.flops * REACHED_FLOPS}", "--link", f"{int(of.link * REACHED_LINK)}B/s"
    )  # fmt: skip
    assert known["step_s"] == pytest.approx(same["step_s"], rel=0.05) and not any("sheet" in s for s in same["assumed"])
    slower = figures(SOURCE, *given, "--device", "H100", "--device-memory", "18MiB", "--link", "1MB/s")
    assert slower["step_s"] > 10 * known["step_s"]


def test_a_checkpoint_is_planned_as_its_model(tmp_path: Path) -> None:
    model = make_gpt(SMALL, torch.bfloat16)
    save_file(dict(model.state_dict()), tmp_path / "model-1.safetensors")
    index = {"weight_map": dict.fromkeys(model.state_dict(), "model-1.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    wanted = figures(SOURCE, *GIVEN, "--no-table")
    for source in (tmp_path / "model-1.safetensors", tmp_path / "model.safetensors.index.json", tmp_path):
        found = figures(str(source), *GIVEN, "--no-table")
        assert found["parameters"] == SMALL.parameters
        assert found["smallest_host_bytes"] == pytest.approx(wanted["smallest_host_bytes"], rel=0.05)
        assert found["written_bytes"] == pytest.approx(wanted["written_bytes"], rel=0.05)


def test_of_settings_only_those_stay_that_no_other_beats() -> None:
    def row(step_s: float, memory: int, written: int) -> SettingCosts:
        return SettingCosts("exact", "step", "-", 1, step_s, memory, written)

    best, smaller, beaten, equal = row(1, 9, 5), row(2, 4, 5), row(2, 5, 5), row(1, 9, 5)
    assert undominated([beaten, best, equal, smaller]) == [best, smaller]
    inexact, cheaper = replace(best, codec="8bit"), replace(best, codec="8bit", written_bytes=4)
    assert undominated([inexact, best]) == [best] and undominated([best, cheaper]) == [best, cheaper]


@pytest.mark.parametrize("host_bytes", [24 << 20, 64 << 20, 160 << 20])
def test_the_table_has_each_placement_that_none_beats(host_bytes: int) -> None:
    forecaster, on = Forecaster(meta_gpt(), 64), machine(host_bytes)
    rows = find_table(forecaster, on, Setting())
    everything = []
    for codec, (params, state), update, share, passes in itertools.product(
        CODECS, PREFERENCES, UPDATES, MEMORY_SHARES, PASSES
    ):
        of = Setting(codec=codec, update=update, params=params, optimizer_state=state, passes=passes)
        smaller = replace(on, host_bytes=host_bytes // share)
        with contextlib.suppress(BudgetError):
            found = forecaster.forecast(smaller, of, TABLE_PAGES)
            saved_bytes = saved_for_backward(forecaster.model) * 64 // passes
            places = ", ".join(name for name in ("param", "state", "grad") if found.plan.places[name] == "nvme") or "-"
            memory_bytes = found.memory_bytes + saved_bytes
            everything.append(
                SettingCosts(codec, update, places, passes, found.step.wall_s, memory_bytes, found.written_bytes)
            )
    on_host = [row for row in rows if "grad" not in row.on_nvme]
    assert {row.costs for row in undominated(everything)} >= {row.costs for row in on_host}
    assert not any(other.beats(row) for row in rows for other in everything)
    assert {row.codec for row in rows} == {"exact", "8bit"}
    places = {row.on_nvme for row in rows}
    assert places == {"-"} if host_bytes == 160 << 20 else len(places) >= 2


def test_a_models_function_is_found_in_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_net.py").write_text("from torch import nn\n\ndef net():\n    return nn.Linear(64, 64)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    assert figures("my_net:net", *GIVEN, "--no-table")["step_s"] > 0


@pytest.mark.whole
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nowhere/config.json"], "nowhere/config.json does not exist"),
        (["no_such_module:model"], "no model can be made from no_such_module:model: ModuleNotFoundError"),
        (["unit.test_plan_command:run"], "returned a Result: it must return a torch.nn.Module"),
        (["unit.test_plan_command:gpt_of"], "missing 1 required positional argument: 'layers'"),
        (["unit.test_plan_command:SMALL"], "'GptConfig' object is not callable"),
        (["builtins:chr"], "chr() takes exactly one argument"),
        ([SOURCE, "--optimizer", "shampoo"], "--optimizer='shampoo' is not known"),
        ([SOURCE, "--codec", "4bit"], "--codec='4bit' is not known: use one of 'exact', 'split', 'bf16', '8bit'"),
        ([SOURCE, "--update", "never"], "--update='never' is not known"),
        ([SOURCE, "--gradients", "device"], "--gradients='device' is not known: use one of 'auto', 'host', 'nvme'"),
        ([SOURCE, "--flops", "0"], "--flops"),
        ([SOURCE, "--host", "much"], "--host='much' is not a size"),
        ([SOURCE, "--host", "64Gb"], "say 64GB for bytes of 1000, 64GiB for those of 1024"),
        ([SOURCE, "--host", "64G"], "G could mean bits or bytes"),
        ([SOURCE, "--nvme", "7Gb/s,5GB/s"], "--nvme='7Gb': Gb could mean bits or bytes"),
        ([SOURCE, "--nvme", "7gbps,5GB/s"], "say 7GB for bytes"),
        ([SOURCE, "--host", "64"], "--host='64' has no unit: say 64GiB"),
        ([SOURCE, "--endurance", "600"], "--endurance='600' has no unit"),
        ([SOURCE, "--nvme", "7,5"], "--nvme='7' has no unit"),
        (
            [SOURCE, "--nvme", "7GB/s"],
            "--nvme 7GB/s: there is no such directory. Give a directory on the drive, or its rates",
        ),
        ([SOURCE, "--nvme", "1GB/s,2GB/s,3GB/s"], "or its rates, read and write, as 7GB/s,5GB/s"),
        ([SOURCE, "--nvme", "/no/drive"], "--nvme /no/drive: there is no such directory"),
        ([SOURCE, "--ranks", "3", "--nodes", "2"], "give a multiple of --nodes 2"),
        ([SOURCE, "--tokens", "3", "--accumulate", "4"], "need at least 4"),
        ([SOURCE, "--link", "25GB/s"], "give --device"),
        ([SOURCE, "--device-memory", "1GiB"], "give --device"),
        ([SOURCE, "--device", "H1000"], "--device H1000 is not known: give one of A100, H100"),
        (
            [SOURCE, "--device", "24GiB", "--device-memory", "1GiB"],
            "--device-memory goes with a --device that is known",
        ),
        ([SOURCE, "--device", "24GiB", "--update-on", "gpu"], "--update-on='gpu' is not known"),
        ([SOURCE, "--network", "25GB/s"], "give --ranks"),
    ],
    ids=str,
)
def test_plan_says_what_is_wrong(arguments: list[str], named: str) -> None:
    given = (
        [*GIVEN] if "--nvme" not in arguments else [each for each in GIVEN if each not in ("--nvme", "100MB/s,50MB/s")]
    )
    done = run("plan", arguments[0], *given, *arguments[1:])
    assert done.exit_code == 2, done.output
    assert named in done.output.replace("\n", "")


@pytest.mark.whole
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "llama9000"}, "llama9000"),
        ({"model_type": None}, "model type"),
        ({"num_attention_heads": 5}, "The hidden size (64) is not a multiple of the number of attention heads (5)"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, and must be at least 1"),
    ],
    ids=str,
)
def test_a_configuration_that_makes_no_model_is_refused(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **change}))
    done = run("plan", str(tmp_path), *GIVEN)
    assert done.exit_code == 2, done.output
    assert named in done.output.replace("\n", "")


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("config.json", b"{not json", "is not a valid JSON file"),
        ("config.json", b"[1]", "Unrecognized model in"),
        ("model.safetensors", b"\x40\0\0\0\0\0\0\0{}", "is cut off: its header has 64 bytes"),
        ("model.safetensors", b"\x02\0\0\0\0\0\0\0[]", "is neither a safetensors file nor a torch checkpoint"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a.weight": "x.safetensors"}}',
            "1 of 1 shards are missing",
        ),
        ("model.safetensors.index.json", b"{}", "has no weight_map"),
        (
            "a.safetensors",
            b'{"a.weight": {"dtype": "I8", "shape": [3], "data_offsets": [0, 3]}}',
            "quantized weights cannot",
        ),
        ("a.safetensors", b'{"a.weight": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}', "has no parameters"),
    ],
    ids=str,
)
def test_a_damaged_source_is_named(name: str, content: bytes, named: str, tmp_path: Path) -> None:
    if name == "a.safetensors":
        content = len(content).to_bytes(8, "little") + content + b"\0" * 3 * (b"I8" in content)
    (tmp_path / name).write_bytes(content)
    done = run("plan", str(tmp_path / name), *GIVEN)
    assert done.exit_code == 2, done.output
    assert named in done.output.replace("\n", "") and name in done.output.replace("\n", "")


def test_a_drive_is_named_by_a_directory_that_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    given = ["--host", "24MB", "--flops", "1e12", "--updates", "1e9", "--tokens", "64", "--no-table"]
    refused = run("plan", SOURCE, *given, "--nvme", str(tmp_path))
    assert refused.exit_code == 2 and "has no measurement of this drive" in refused.output
    keep_tuning(tmp_path, Tuning(1 << 20, 8, "threads", 100e6, 50e6))
    measured = figures(SOURCE, *given, "--nvme", str(tmp_path))
    said = figures(SOURCE, *given, "--nvme", "100MB/s,50MB/s")
    two = figures(SOURCE, *given, "--nvme", str(tmp_path), "--nvme", "100MB/s,50MB/s")
    assert measured["step_s"] == said["step_s"]
    assert two["step_s"] < 0.6 * said["step_s"]

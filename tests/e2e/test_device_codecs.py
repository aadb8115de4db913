"""Encoded state that is updated on a device: the bits of an update on the CPU, in fewer bytes each way; by Triton's kernels too."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from infer.host_device import HostDevice
from torch import nn

import swapper
from e2e import coded_device_run
from e2e.coded_device_run import digests
from e2e.coded_runs import UPDATED_THERE, Run, bf16_net, run_of
from e2e.models import Net
from e2e.optimizers import OPTIMIZERS
from e2e.processes import LONG_S, environment
from e2e.twins import adamw, assert_same
from swapper.runtime.process import rng_states, set_rng_states
from swapper.train.groups.group_state import GroupState

STATE = ["nvme", "device"]


@pytest.mark.parametrize("state", STATE)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw fused", "adamw amsgrad", "adamw maximize", "adafactor"])
def test_any_optimizer_has_the_bits_that_it_has_on_the_cpu(tmp_path: Path, optimizer: str, state: str) -> None:
    make = with_maximize if optimizer == "adamw maximize" else OPTIMIZERS[optimizer]
    expected = run_of(tmp_path / "cpu", "8bit", make_optimizer=make)
    found = run_of(tmp_path / "device", "8bit", make_optimizer=make, optimizer_state=state, **UPDATED_THERE)
    assert found[0] == expected[0]
    assert_same(found[1], expected[1])


def with_maximize(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, maximize=True)


@pytest.mark.parametrize("state", STATE)
@pytest.mark.parametrize("kernel", [False, True])
def test_split_masters_are_the_exact_ones(tmp_path: Path, state: str, kernel: bool) -> None:
    there = {**UPDATED_THERE, "optimizer_state": state}
    if kernel:
        there["accelerator"] = swapper.Accelerator(update_on="device", update_with="kernel")
    exact, split = (run_of(tmp_path / codec, codec, **there) for codec in ("exact", "split"))
    assert exact[0] == split[0]
    assert_same({**split[1], "masters": {}}, {**exact[1], "masters": {}})


def test_state_crosses_the_link_encoded(tmp_path: Path) -> None:
    moved = {}
    for codec in ("exact", "8bit"):
        run = Run(tmp_path / codec, codec, **UPDATED_THERE, optimizer_state="nvme", gradients="device")
        run.train(2)
        before = copy.copy(run.manager.counters)
        run.train(3)
        after = run.manager.counters
        moved[codec] = after.uploaded_bytes - before.uploaded_bytes, after.downloaded_bytes - before.downloaded_bytes
        run.close()
    elements = sum(p.numel() for p in bf16_net().parameters() if p.dim() > 1)
    up, down = (moved["exact"][n] - moved["8bit"][n] for n in range(2))
    assert down == pytest.approx(3 * elements * (12 - 3.1875), rel=0.02)
    assert up == pytest.approx(3 * elements * (12 - 3.1875), rel=0.02)  # parameters are there


def test_state_that_stays_on_the_device_takes_the_bytes_of_its_code(tmp_path: Path) -> None:
    taken = {}
    for codec in ("exact", "8bit"):
        run = Run(tmp_path / codec, codec, **UPDATED_THERE, optimizer_state="device")
        run.train(1)
        kept = run.manager.current.run.model.optimizer_state.kept
        taken[codec] = sum(group.storage.nbytes for group in kept._groups.values())
        assert "on the device" in str(run.manager.current.run.plan)
        run.close()
    assert taken["8bit"] < 0.3 * taken["exact"]


NOT_HELD = r"'exp_avg' of blocks\.1\.up\.weight has \d+ values that the codec 'moment8' cannot hold"


@pytest.mark.parametrize(
    "places",
    [{"optimizer_state": "nvme"}, {"optimizer_state": "host", "params": "host", "commit_every": 1}],
    ids=["nvme", "host"],
)
@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_values_that_a_codec_cannot_hold_fail_the_step_and_it_is_undone(
    tmp_path: Path, update: str, places: dict[str, Any]
) -> None:
    """They come to light when they were counted: in the step, or, deferred, before the parameters are used."""
    run = Run(tmp_path / "run", "8bit", **UPDATED_THERE, **places, update=update, host_memory="64MiB")
    run.train(2)
    before = run.content()
    run.manager.current.run.committer.finish()
    fail_in(run, torch.inf)
    states = {group.state for group in run.manager.current.run.model.groups}
    assert states <= {GroupState.CURRENT, GroupState.DUE}, "an update that failed is undone"
    if update == "deferred":  # as any update that fails then, it stays to be done
        for use in (run.content, run.close):
            with pytest.raises(swapper.StateError, match=NOT_HELD):
                use()
    else:
        run.optimizer.zero_grad()
        assert_same(run.content(), before)
    run.close()


def test_values_that_a_codec_cannot_hold_are_told_of_where_state_stays_on_the_device(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "8bit", **UPDATED_THERE, optimizer_state="device", host_memory="64MiB")
    run.train(2)
    fail_in(run, torch.nan)
    with pytest.raises(swapper.StateError, match=r"step 3 failed half-way.*resume='auto'"):  # no commit has this state
        run.content()
    run.close()


def fail_in(run: Run, gradient: float) -> None:
    run.model.blocks[1].up.weight.register_hook(lambda given: torch.full_like(given, gradient))
    with pytest.raises(swapper.StateError, match=NOT_HELD):
        run.model(torch.randint(0, 100, (2, 8))).float().sum().backward()
        run.optimizer.step()
        run.model(torch.randint(0, 100, (2, 8)))


@pytest.mark.parametrize("state", STATE)
def test_state_is_edited_and_loaded_and_a_run_goes_on(tmp_path: Path, state: str) -> None:
    contents = []
    for name, options in (("cpu", {}), ("device", {**UPDATED_THERE, "optimizer_state": state})):
        run = Run(tmp_path / name, "8bit", **options, commit_every=1)
        losses = run.train(2)
        saved = copy.deepcopy(run.optimizer.state_dict())
        losses += run.train(1)
        run.optimizer.load_state_dict(saved)
        run.optimizer.state[run.model.blocks[1].up.weight]["exp_avg"].mul_(0.5)
        del run.optimizer.state[run.model.blocks[2].up.weight]
        losses += run.train(1)
        generator = rng_states()
        run.close()
        run = Run(tmp_path / name, "8bit", **options, host_memory="64MiB")
        set_rng_states(generator)
        contents.append((losses + run.train(1), run.content()))
        run.close()
    assert contents[0][0] == contents[1][0]
    assert_same(contents[1][1], contents[0][1])


@pytest.mark.usefixtures("stand_in")
def test_muon_and_adamw_have_the_bits_that_they_have_on_the_cpu(tmp_path: Path) -> None:
    contents = []
    for name, options in (("cpu", {}), ("device", UPDATED_THERE)):
        model = bf16_net()
        matrices = [p for block in model.blocks for p in block.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
        optimizers = [torch.optim.Muon(matrices, lr=1e-2), adamw(others)]
        given = {key: HostDevice(value) if key == "device" else value for key, value in options.items()}
        with swapper.SwapManager(tmp_path / name, host_memory="16MiB") as manager:
            _, optimizers = manager.offload(
                model, optimizers, master_weights=torch.float32, state_codec="8bit", optimizer_state="nvme", **given
            )
            torch.manual_seed(1)
            for _ in range(3):
                model(torch.randint(0, 100, (2, 8))).float().square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            with manager.gather(model):
                parameters = [p.detach().clone() for p in model.parameters()]
            contents.append((parameters, [copy.deepcopy(one.state_dict()["state"]) for one in optimizers]))
    assert "momentum_buffer" in contents[0][1][0][0]
    assert_same(contents[1], contents[0])


def test_masters_that_are_a_rest_are_not_rounded_stochastically(tmp_path: Path) -> None:
    accelerator = swapper.Accelerator(update_on="device", update_with="kernel", stochastic_rounding=1)
    there = {**UPDATED_THERE, "accelerator": accelerator}
    with pytest.raises(swapper.ConfigError, match="stochastic_rounding does not go with a codec of the masters"):
        Run(tmp_path / "run", "8bit", host_memory="64MiB", **there)
    run_of(tmp_path / "other", {"exp_avg": "moment8"}, steps=1, host_memory="64MiB", **there)


def test_a_device_without_kernels_is_refused(tmp_path: Path) -> None:
    class Other(HostDevice):
        """As a device of a type that Triton does not compile for."""

        def __init__(self) -> None:
            super().__init__("late")
            self.device = torch.device("meta")

    with swapper.SwapManager(tmp_path / "run", host_memory="64MiB") as manager:
        model: nn.Module = Net().bfloat16()
        with pytest.raises(swapper.UnsupportedError, match="state is decoded on cuda and xpu, not on meta"):
            manager.offload(
                model, adamw(model.parameters()), master_weights=torch.float32, state_codec="8bit", device=Other(),
                device_memory="64MiB", accelerator=swapper.Accelerator(update_on="device"),
            )  # fmt: skip


@pytest.mark.parametrize("codec", ["split", "bf16", "8bit"])
def test_tritons_kernels_have_the_bits_of_the_cpus(tmp_path: Path, codec: str) -> None:
    """By Triton's interpreter, in a process of its own: codecs and AdamW of a whole run."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'torch-swapper[triton]'")
    expected = digests(tmp_path / "cpu", codec, None)
    command = [sys.executable, Path(coded_device_run.__file__), tmp_path / "device", codec]
    interpreted = {**environment(), "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, env=interpreted, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("codec", ["bf16", "8bit"])
def test_an_update_on_a_gpu_has_the_bits_of_one_on_the_cpu(tmp_path: Path, codec: str) -> None:
    places = ("cpu", "device")
    on_cpu, on_gpu = (digests(tmp_path / place, codec, place, "cuda") for place in places)
    assert on_gpu == on_cpu

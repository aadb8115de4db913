"""Frozen parameters that are read in place from the user's own file: `offload(external=)`. The run's directory has none of their
bytes, the file is not written, and training is that of plain torch, bit for bit."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from infer.host_device import HostDevice
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import swapper
from e2e.cold_operations import cold
from e2e.external_files import FORMS, bytes_of, found_in, frozen, half_frozen, lent_pages, saved, shifted, trained
from e2e.models import Net, loss_of, tokens, train_step
from e2e.twins import Twins, adamw, assert_same, send_away, smallest_budget
from swapper import ExternalWeights
from swapper.durability.publication import Publication
from swapper.durability.verify import verify
from swapper.integrations.transformers import for_training

MakeTwins = Callable[..., Twins]
MIB = 1 << 20


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_training_is_that_of_plain_torch_and_the_directory_has_nothing_of_the_base(
    tmp_path: Path, twins: MakeTwins, form: str, update: str
) -> None:
    model = half_frozen()
    path = FORMS[form](model, tmp_path / "base.file")
    before = bytes_of(path)
    pair = twins(model, external=ExternalWeights(path=path), update=update)
    pair.train(train_step, steps=3)
    base = frozen(pair.plain)
    assert pair.manager is not None
    pair.manager.current.run.pager.flush()
    assert found_in(pair.directory, base) == []
    assert_same(dict(pair.swapped.state_dict()), dict(pair.plain.state_dict()))
    pair.finish()
    assert found_in(pair.directory, base) == []
    assert bytes_of(path) == before


def test_what_is_compared_would_be_found_if_it_were_copied(tmp_path: Path, twins: MakeTwins) -> None:
    model = half_frozen()
    pair = twins(model)
    pair.train(train_step, steps=1)
    assert found_in(pair.directory, frozen(pair.plain)) == list(frozen(pair.plain))


@pytest.mark.parametrize("places", [{"params": "host"}, {"gradients": "nvme"}, {"master": True}])
def test_wherever_the_rest_lives(tmp_path: Path, twins: MakeTwins, places: dict[str, Any]) -> None:
    model = half_frozen(torch.bfloat16)
    path = shifted(model, tmp_path / "base.safetensors")
    pair = twins(model, external=ExternalWeights(path=path), commit_every=1, **places)
    pair.train(train_step, steps=3)
    assert found_in(pair.directory, frozen(pair.plain)) == []
    pair.finish(paged=False)


def test_on_several_drives(tmp_path: Path, twins: MakeTwins, second_drive: Path) -> None:
    model = half_frozen()
    path = saved(model, tmp_path / "base.safetensors")
    (second_drive / "other").mkdir()
    pair = twins(model, external=ExternalWeights(path=path), others=[second_drive / "other"])
    pair.train(train_step, steps=3)
    assert found_in(pair.directory, frozen(pair.plain)) == found_in(second_drive, frozen(pair.plain)) == []
    pair.finish()


@pytest.mark.parametrize("update_on", ["cpu", "device"])
def test_on_a_device(tmp_path: Path, twins: MakeTwins, update_on: str) -> None:
    model = half_frozen()
    path = saved(model, tmp_path / "base.safetensors")
    pair = twins(
        model,
        external=ExternalWeights(path=path),
        device=HostDevice("late"),
        device_memory=8 * MIB,
        room_bytes=MIB,
        update_on=update_on,
    )
    pair.train(train_step, steps=3)
    pair.assert_same_parameters()
    assert pair.manager is not None
    with pair.manager.gather(pair.swapped, write=True):
        pass
    assert found_in(pair.directory, frozen(pair.plain)) == [], "nothing was changed"
    pair.finish(paged=False)


def llama(dtype: torch.dtype) -> nn.Module:
    config = LlamaConfig(
        vocab_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
        hidden_size=256, intermediate_size=512,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def losses(model: Any, optimizer: Any) -> list[float]:
    batch = torch.randint(0, 512, (2, 16), generator=torch.Generator().manual_seed(2))
    model.train()
    found = []
    for _ in range(3):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on_meta", [False, True])
def test_adapters_of_peft_on_a_published_model(tmp_path: Path, dtype: torch.dtype, on_meta: bool) -> None:
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    from swapper.integrations.peft import base_names, get_peft_model

    def config() -> Any:
        return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")

    (tmp_path / "run").mkdir()
    path = tmp_path / "model"
    llama(dtype).save_pretrained(path, max_shard_size="1MB")  # type: ignore[operator]
    before = bytes_of(path)
    torch.manual_seed(3)
    plain = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(path, dtype=dtype), config())
    if on_meta:
        base, values = for_training(AutoModelForCausalLM, path, dtype=dtype)
    else:
        base, values = AutoModelForCausalLM.from_pretrained(path, dtype=dtype), None
    torch.manual_seed(3)
    model = get_peft_model(base, config())
    options: dict[str, Any] = {"params": "nvme", "optimizer_state": "nvme", "init": values}
    options.update(external=ExternalWeights(path=path, rename=base_names(model)))
    optimizer = trained(model)
    budget = smallest_budget(tmp_path / "run", model, optimizer, **options)
    with swapper.SwapManager(tmp_path / "run", budget) as manager:
        model, optimizer = manager.offload(model, optimizer, **options)
        assert losses(model, optimizer) == losses(plain, trained(plain))
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))
        adapters = peft.get_peft_model_state_dict(model)
        peft.set_peft_model_state_dict(model, {name: t.clone() for name, t in adapters.items()})
        assert losses(model, optimizer)
        manager.current.run.pager.flush()
        assert found_in(tmp_path / "run", frozen(plain)) == []
        assert manager.counters.bytes_read > sum(p.nbytes for p in frozen(plain).values())
    assert bytes_of(path) == before


def test_a_model_on_the_meta_device_with_first_values_for_the_rest(tmp_path: Path) -> None:
    path = saved(half_frozen(), tmp_path / "base.safetensors")
    plain = half_frozen()
    plain.load_state_dict(load_file(path))
    with torch.device("meta"):
        model = half_frozen()

    def fill(module: nn.Module) -> None:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                parameter.fill_(0.5 if name == "bias" else 1.0)

    for parameter in plain.parameters():
        if parameter.requires_grad:
            parameter.data.fill_(1.0 if parameter is plain.norm.weight else 0.5)
    for block in plain.blocks:
        block.norm.weight.data.fill_(1.0)
    with swapper.SwapManager(tmp_path, "16MiB") as manager:
        model, optimizer = manager.offload(
            model,
            adamw(p for p in model.parameters() if p.requires_grad),
            params="nvme",
            init=fill,
            external=ExternalWeights(path=path),
        )
        plain_optimizer = trained(plain)
        for _ in range(2):
            batch = tokens()
            for one, its in ((model, optimizer), (plain, plain_optimizer)):
                loss_of(one, batch).backward()
                its.step()
                its.zero_grad()
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))
        assert found_in(manager._directory.path, frozen(plain)) == []


def normalizing() -> nn.Sequential:
    """A frozen base with batch norm, whose averages are of no training yet, and a layer that is trained."""
    base = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Linear(256, 256)).requires_grad_(False)
    return nn.Sequential(base, nn.Linear(256, 8))


@pytest.mark.parametrize("save", [torch.save, save_file], ids=["torch", "safetensors"])
@pytest.mark.parametrize("is_renamed", [False, True])
def test_buffers_of_the_file_go_with_its_parameters(tmp_path: Path, save: Any, is_renamed: bool) -> None:
    """Where the model has no values of its own; a run that goes on has them too."""
    plain = normalizing()
    plain(torch.randn(64, 256) + 3)
    path = tmp_path / "base"
    save({name: value.clone() for name, value in plain[0].state_dict().items()}, path)
    rename = {name: f"0.{name}" for name in plain[0].state_dict()} if is_renamed else lambda name: f"0.{name}"

    def offloaded(manager: swapper.SwapManager) -> nn.Sequential:
        with swapper.without_weights():
            model = normalizing()
        model[1] = nn.Linear(256, 8)
        model[1].load_state_dict(plain[1].state_dict())
        external = ExternalWeights(path=path, rename=rename)
        return manager.offload(model, trained(model), params="nvme", external=external)[0]

    value = torch.randn(4, 256)
    expected = plain.eval()(value)
    for _ in range(2):
        with swapper.SwapManager(tmp_path / "run", "16MiB", resume="auto") as manager:
            model = offloaded(manager).eval()
            assert_same(dict(model.named_buffers()), dict(plain.named_buffers()))
            assert torch.equal(model(value), expected)


def test_buffers_of_a_file_that_are_others_than_the_models_are_refused(tmp_path: Path) -> None:
    plain = normalizing()
    state = {f"{name}": value for name, value in plain.state_dict().items() if name.startswith("0.")}
    torch.save(state | {"0.1.running_mean": torch.zeros(3)}, tmp_path / "base.pt")
    with swapper.without_weights():
        model = normalizing()
    model[1] = nn.Linear(256, 8)
    with (
        swapper.SwapManager(tmp_path / "run", "16MiB") as manager,
        pytest.raises(swapper.CheckpointError, match=r"buffer 0\.1\.running_mean is \[256\], and in .*base\.pt \[3\]"),
    ):
        manager.offload(model, trained(model), params="nvme", external=ExternalWeights(path=tmp_path / "base.pt"))
    assert not list((tmp_path / "run").rglob("*.swap"))


def test_first_values_for_what_the_file_has_are_refused(tmp_path: Path) -> None:
    path = saved(half_frozen(), tmp_path / "base.safetensors")
    with torch.device("meta"):
        model = half_frozen()

    def fill(module: nn.Module) -> None:
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.fill_(1.0)

    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    with (
        swapper.SwapManager(tmp_path, "16MiB") as manager,
        pytest.raises(swapper.StateError, match=r"init= changed .*blocks.0.up.weight, which external= has"),
    ):
        manager.offload(model, optimizer, params="nvme", init=fill, external=ExternalWeights(path=path))


def test_state_of_what_is_read_in_place_is_not_kept_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = half_frozen()
    path = saved(model, tmp_path / "base.safetensors")
    optimizer = torch.optim.Adagrad(model.parameters())  # which makes the state of all in its constructor
    with swapper.SwapManager(tmp_path, "16MiB") as manager:
        _, offloaded = manager.offload(model, optimizer, params="nvme", external=ExternalWeights(path=path))
        named = [name for name, _ in model.named_parameters()]
        assert {named[n] for n in offloaded.state_dict()["state"]} == {*named} - {*frozen(model)}
    assert "state of frozen parameters (blocks.0.down.weight) is not kept" in caplog.text


def test_a_model_that_is_used_and_not_trained(tmp_path: Path) -> None:
    plain = Net().requires_grad_(False)
    path = saved(plain, tmp_path / "base.safetensors")
    model = copy.deepcopy(plain)
    batch = tokens()
    with swapper.SwapManager(tmp_path, "8MiB") as manager:
        manager.offload(model, params="nvme", external=ExternalWeights(path=path))
        with torch.no_grad():
            assert torch.equal(model(batch), plain(batch))


def test_the_plan_says_what_it_saves(tmp_path: Path) -> None:
    model = half_frozen()
    path = saved(model, tmp_path / "base.safetensors")
    base_bytes = sum(p.nbytes for p in frozen(model).values())
    with swapper.SwapManager(tmp_path, "16MiB") as manager:
        copied = manager.plan(model, trained(model), params="nvme")
        external = manager.plan(model, trained(model), params="nvme", external=ExternalWeights(path=path))
    assert copied.space_bytes - external.space_bytes >= 2 * base_bytes - external.turns * 4096 * len(frozen(model))
    assert sum(external.space_by_drive()) == external.space_bytes
    assert f"read from {path}" in str(external)
    assert "read from" not in str(copied)
    with swapper.SwapManager(tmp_path, "16MiB") as manager:
        manager.offload(model, trained(model), params="nvme", external=ExternalWeights(path=path))
        taken = sum(file.stat().st_blocks * 512 for file in tmp_path.rglob("*.swap"))
        assert taken < base_bytes / 2


# --- what is done with them besides -----------------------------------------------------------------------------------


def test_what_is_changed_goes_to_the_swap_files_and_the_file_stays(tmp_path: Path, twins: MakeTwins) -> None:
    model = half_frozen()
    path = saved(model, tmp_path / "base.safetensors")
    before = bytes_of(path)
    pair = twins(model, external=ExternalWeights(path=path))
    assert pair.manager is not None
    external = lent_pages(pair.manager)

    def change(model: Any, _: Any) -> None:
        weight = model.blocks[1].up.weight
        if model is pair.swapped:
            with pair.manager.gather(weight, write=True), torch.no_grad():
                weight.mul_(1.5)
        else:
            weight.data.mul_(1.5)

    pair.train(train_step, steps=1)
    pair.both(change)
    send_away(pair.manager)
    assert 0 < lent_pages(pair.manager) < external
    assert_same(dict(pair.swapped.state_dict()), dict(pair.plain.state_dict()))
    pair.train(train_step, steps=2)
    pair.manager.snapshot(tmp_path / "x.pt").wait()
    assert_same(dict(torch.load(tmp_path / "x.pt")["model"]), dict(pair.plain.state_dict()))
    pair.finish()
    assert bytes_of(path) == before


def test_a_state_dict_that_is_loaded_moves_only_what_it_changes(tmp_path: Path, twins: MakeTwins) -> None:
    model = half_frozen()
    pair = twins(model, external=ExternalWeights(path=saved(model, tmp_path / "base.safetensors")))
    pair.train(train_step, steps=1)
    assert pair.manager is not None
    external = lent_pages(pair.manager)
    pair.swapped.load_state_dict(pair.plain.state_dict())
    send_away(pair.manager)
    assert lent_pages(pair.manager) == external
    pair.train(train_step, steps=1)
    pair.finish()


@pytest.mark.parametrize("form", FORMS)
def test_a_snapshot_is_whole_and_one_without_them_names_them(tmp_path: Path, twins: MakeTwins, form: str) -> None:
    model = half_frozen()
    path = FORMS[form](model, tmp_path / "base.file")
    pair = twins(model, external=ExternalWeights(path=path))
    assert pair.manager is not None
    for step in range(2):  # the second one finds the first one's file
        pair.train(train_step, steps=1)
        pair.manager.snapshot(tmp_path / f"whole-{step}.pt").wait()
        pair.manager.snapshot(tmp_path / f"rest-{step}.pt", frozen="reference").wait()
        whole, rest = torch.load(tmp_path / f"whole-{step}.pt"), torch.load(tmp_path / f"rest-{step}.pt")
        assert_same(dict(whole["model"]), dict(pair.plain.state_dict()))
        assert set(rest["swapper"]["left_out"]) == set(frozen(pair.plain))
        assert_same(dict(rest["model"]), {n: p.data for n, p in pair.plain.named_parameters() if p.requires_grad})
        for name in ("whole", "rest"):
            assert verify(tmp_path / f"{name}-{step}.pt")[0].faults == []
    assert lent_pages(pair.manager)
    pair.train(
        train_step, steps=2
    )  # of two snapshots of one step the first one's file is spared until the second next commit
    assert found_in(pair.directory, {"": pair.plain.head.weight}) == []
    pair.finish()


def test_a_snapshot_on_another_filesystem(tmp_path: Path, twins: MakeTwins, second_drive: Path) -> None:
    model = half_frozen()
    pair = twins(model, external=ExternalWeights(path=saved(model, tmp_path / "base.safetensors")))
    pair.train(train_step, steps=1)
    assert pair.manager is not None
    pair.manager.snapshot(second_drive / "x.pt").wait()
    assert_same(dict(torch.load(second_drive / "x.pt")["model"]), dict(pair.plain.state_dict()))
    assert verify(second_drive / "x.pt")[0].faults == []
    pair.finish(paged=False)


def test_unfreezing_moves_what_is_trained_and_leaves_the_rest(tmp_path: Path, twins: MakeTwins) -> None:
    model = half_frozen()
    path = saved(model, tmp_path / "base.safetensors")
    before = bytes_of(path)
    pair = twins(model, external=ExternalWeights(path=path), room_bytes=4 * MIB)

    def unfreeze(model: Any, optimizer: Any) -> None:
        model.blocks[1].up.weight.requires_grad_(True)
        optimizer.add_param_group({"params": [model.blocks[1].up.weight]})

    pair.train(train_step, steps=2)
    pair.both(unfreeze)
    pair.train(train_step, steps=2)
    assert found_in(pair.directory, frozen(pair.plain)) == []
    pair.finish(paged=False)
    assert bytes_of(path) == before


def test_a_read_that_goes_past_the_guard_is_answered_to_the_last_byte(tmp_path: Path, twins: MakeTwins) -> None:
    """The file ends within the last sector of what it lends."""
    model = Net()
    model.requires_grad_(False)
    for block in model.blocks:
        block.requires_grad_(True)
    path = shifted(model, tmp_path / "base.safetensors")  # in the model's order: the head is the last
    assert path.stat().st_size % 4096
    pair = twins(model, external=ExternalWeights(path=path))
    assert pair.manager is not None
    with pair.manager.gather(cold(pair)):
        alias = cold(pair).data
    send_away(pair.manager)
    assert torch.equal(alias.clone(), pair.plain.head.weight)
    pair.train(train_step, steps=1)


def test_a_snapshot_of_a_file_that_changes_meanwhile_is_none(
    tmp_path: Path, twins: MakeTwins, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = half_frozen()
    path = saved(model, tmp_path / "base.safetensors")
    pair = twins(model, external=ExternalWeights(path=path))
    pair.train(train_step, steps=1)
    before = path.stat()

    def copy_other_files(self: Publication, file: Any) -> None:
        os.utime(path, ns=(1, 1))
        original(self, file)

    original = Publication._copy_other_files
    monkeypatch.setattr(Publication, "_copy_other_files", copy_other_files)
    assert pair.manager is not None
    ticket = pair.manager.snapshot(tmp_path / "x.pt")
    with pytest.raises(swapper.CheckpointError, match=r"base.safetensors was changed while frozen parameters"):
        ticket.wait()
    assert not (tmp_path / "x.pt").exists()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    pair.train(train_step, steps=1)
    pair.finish(paged=False)

"""Frozen parameters that are read in place from the user's own file: `offload(frozen_from=)`. The run's directory has none of their
bytes, the file is not written, and training is that of plain torch, bit for bit."""

from __future__ import annotations

import copy
import json
import os
import shutil
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
from e2e.models import Net, loss_of, tokens, train_step
from e2e.twins import Twins, adamw, assert_same, send_away, smallest_budget
from swapper.checkpoint.publication import Publication
from swapper.checkpoint.verify import verify
from swapper.core.section import LENT
from swapper.integrations.transformers import for_training

MakeTwins = Callable[..., Twins]
MIB = 1 << 20
NEEDLE_BYTES = 48


def half_frozen(dtype: torch.dtype = torch.float32) -> Net:
    """Large weights are frozen; of most modules that have one the bias is trained."""
    model = Net(depth=8).to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias") or "norm" in name)
    return model


def saved(model: nn.Module, path: Path) -> Path:
    save_file({name: p.detach().clone() for name, p in model.named_parameters()}, path)
    return path


def shifted(model: nn.Module, path: Path) -> Path:
    """A safetensors file in which nothing lies at a multiple of its size: a tensor of one byte comes first."""
    tensors: dict[str, torch.Tensor] = {"a": torch.zeros(1, dtype=torch.uint8)}
    tensors.update({name: p.detach().clone() for name, p in model.named_parameters()})
    header, payload = {}, b""
    for name, tensor in tensors.items():
        data = tensor.view(-1).view(torch.uint8).numpy().tobytes()
        kind = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}[tensor.dtype]
        places = [len(payload), len(payload) + len(data)]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": places}
        payload += data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + payload)
    return path


def torch_file(model: nn.Module, path: Path) -> Path:
    torch.save({"model": model.state_dict()}, path)
    return path


def sharded(model: nn.Module, path: Path) -> Path:
    path.mkdir()
    names: dict[str, str] = {}
    tensors = {name: p.detach().clone() for name, p in model.named_parameters()}
    for number in range(3):
        part = dict(list(tensors.items())[number::3])
        file = f"model-{number + 1:05}-of-00003.safetensors"
        save_file(part, path / file)
        names.update(dict.fromkeys(part, file))
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return path


FORMS: dict[str, Callable[[nn.Module, Path], Path]] = {
    "safetensors": saved,
    "at odd places": shifted,
    "torch": torch_file,
    "sharded": sharded,
}


def bytes_of(path: Path) -> dict[str, bytes]:
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return {str(file): file.read_bytes() for file in files if file.is_file()}


def frozen(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if not p.requires_grad}


def found_in(directory: Path, tensors: dict[str, nn.Parameter]) -> list[str]:
    """Names of the tensors of which some bytes are in the run's files. Those are random: they are nowhere by chance."""
    content = b"".join(file.read_bytes() for file in directory.rglob("*") if file.is_file())
    found = []
    for name, tensor in tensors.items():
        data = tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        places = range(0, len(data) - NEEDLE_BYTES, max(len(data) // 16 // NEEDLE_BYTES * NEEDLE_BYTES, NEEDLE_BYTES))
        needles = [data[at : at + NEEDLE_BYTES] for at in places]
        if any(len(set(needle)) > 8 and needle in content for needle in needles):  # rows of zeros are everywhere
            found.append(name)
    return found


def lent_pages(manager: swapper.SwapManager) -> int:
    sections = manager.current.run.sections
    return sum(page.location == LENT for section in sections for page in section.pages or [section.piece])


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.large_table
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_training_is_that_of_plain_torch_and_the_directory_has_nothing_of_the_base(
    tmp_path: Path, twins: MakeTwins, form: str, update: str
) -> None:
    model = half_frozen()
    path = FORMS[form](model, tmp_path / "base.file")
    before = bytes_of(path)
    pair = twins(model, frozen_from=path, update=update)
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
    pair = twins(model, frozen_from=path, commit_every=1, **places)
    pair.train(train_step, steps=3)
    assert found_in(pair.directory, frozen(pair.plain)) == []
    pair.finish(paged=False)


def test_on_several_drives(tmp_path: Path, twins: MakeTwins, second_drive: Path) -> None:
    model = half_frozen()
    path = saved(model, tmp_path / "base.safetensors")
    (second_drive / "other").mkdir()
    pair = twins(model, frozen_from=path, others=[second_drive / "other"])
    pair.train(train_step, steps=3)
    assert found_in(pair.directory, frozen(pair.plain)) == found_in(second_drive, frozen(pair.plain)) == []
    pair.finish()


@pytest.mark.parametrize("update_on", ["cpu", "device"])
def test_on_a_device(tmp_path: Path, twins: MakeTwins, update_on: str) -> None:
    model = half_frozen()
    path = saved(model, tmp_path / "base.safetensors")
    pair = twins(
        model, frozen_from=path, device=HostDevice("late"), device_memory=8 * MIB, room_bytes=MIB, update_on=update_on
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


def trained(model: nn.Module) -> torch.optim.Optimizer:
    return adamw([p for p in model.parameters() if p.requires_grad])


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
    options.update(frozen_from=path, rename=base_names(model))
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
            model, adamw(p for p in model.parameters() if p.requires_grad), params="nvme", init=fill, frozen_from=path
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
        pytest.raises(swapper.StateError, match=r"init= changed .*blocks.0.up.weight, which frozen_from= has"),
    ):
        manager.offload(model, optimizer, params="nvme", init=fill, frozen_from=path)


def test_a_model_that_is_used_and_not_trained(tmp_path: Path) -> None:
    plain = Net().requires_grad_(False)
    path = saved(plain, tmp_path / "base.safetensors")
    model = copy.deepcopy(plain)
    batch = tokens()
    with swapper.SwapManager(tmp_path, "8MiB") as manager:
        manager.offload(model, params="nvme", frozen_from=path)
        with torch.no_grad():
            assert torch.equal(model(batch), plain(batch))


def test_the_plan_says_what_it_saves(tmp_path: Path) -> None:
    model = half_frozen()
    path = saved(model, tmp_path / "base.safetensors")
    base_bytes = sum(p.nbytes for p in frozen(model).values())
    with swapper.SwapManager(tmp_path, "16MiB") as manager:
        copied = manager.plan(model, trained(model), params="nvme")
        lent = manager.plan(model, trained(model), params="nvme", frozen_from=path)
    assert copied.space_bytes - lent.space_bytes >= 2 * base_bytes - lent.turns * 4096 * len(frozen(model))
    assert sum(lent.space_by_drive()) == lent.space_bytes
    assert f"read from {path}" in str(lent)
    assert "read from" not in str(copied)
    with swapper.SwapManager(tmp_path, "16MiB") as manager:
        manager.offload(model, trained(model), params="nvme", frozen_from=path)
        taken = sum(file.stat().st_blocks * 512 for file in tmp_path.rglob("*.swap"))
        assert taken < base_bytes / 2


# --- what is done with them besides -----------------------------------------------------------------------------------


def test_what_is_changed_goes_to_the_swap_files_and_the_file_stays(tmp_path: Path, twins: MakeTwins) -> None:
    model = half_frozen()
    path = saved(model, tmp_path / "base.safetensors")
    before = bytes_of(path)
    pair = twins(model, frozen_from=path)
    assert pair.manager is not None
    lent = lent_pages(pair.manager)

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
    assert 0 < lent_pages(pair.manager) < lent
    assert_same(dict(pair.swapped.state_dict()), dict(pair.plain.state_dict()))
    pair.train(train_step, steps=2)
    pair.manager.snapshot(tmp_path / "x.pt").wait()
    assert_same(dict(torch.load(tmp_path / "x.pt")["model"]), dict(pair.plain.state_dict()))
    pair.finish()
    assert bytes_of(path) == before


def test_a_state_dict_that_is_loaded_moves_only_what_it_changes(tmp_path: Path, twins: MakeTwins) -> None:
    model = half_frozen()
    pair = twins(model, frozen_from=saved(model, tmp_path / "base.safetensors"))
    pair.train(train_step, steps=1)
    assert pair.manager is not None
    lent = lent_pages(pair.manager)
    pair.swapped.load_state_dict(pair.plain.state_dict())
    send_away(pair.manager)
    assert lent_pages(pair.manager) == lent
    pair.train(train_step, steps=1)
    pair.finish()


@pytest.mark.parametrize("form", FORMS)
def test_a_snapshot_is_whole_and_one_without_them_names_them(tmp_path: Path, twins: MakeTwins, form: str) -> None:
    model = half_frozen()
    path = FORMS[form](model, tmp_path / "base.file")
    pair = twins(model, frozen_from=path)
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
    pair.train(train_step, steps=1)
    assert found_in(pair.directory, {"": pair.plain.head.weight}) == []
    pair.finish()


def test_a_snapshot_on_another_filesystem(tmp_path: Path, twins: MakeTwins, second_drive: Path) -> None:
    model = half_frozen()
    pair = twins(model, frozen_from=saved(model, tmp_path / "base.safetensors"))
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
    pair = twins(model, frozen_from=path, room_bytes=4 * MIB)

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
    pair = twins(model, frozen_from=path)
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
    pair = twins(model, frozen_from=path)
    pair.train(train_step, steps=1)
    before = path.stat()

    def bring_over(self: Publication, file: Any) -> None:
        os.utime(path, ns=(1, 1))
        original(self, file)

    original = Publication._bring_over
    monkeypatch.setattr(Publication, "_bring_over", bring_over)
    assert pair.manager is not None
    ticket = pair.manager.snapshot(tmp_path / "x.pt")
    with pytest.raises(swapper.CheckpointError, match=r"base.safetensors was changed while frozen parameters"):
        ticket.wait()
    assert not (tmp_path / "x.pt").exists()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    pair.train(train_step, steps=1)
    pair.finish(paged=False)


# --- a run that goes on -----------------------------------------------------------------------------------------------


class Run:
    """One script that is started again and again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = half_frozen()
        self.path = saved(self.model, directory / "base.safetensors")
        self.options: dict[str, Any] = {"frozen_from": self.path}

    def train(self, steps: int) -> list[float]:
        model = copy.deepcopy(self.model)
        found = []
        with swapper.SwapManager(self.directory, "16MiB", resume="auto", rng=True) as manager:
            torch.manual_seed(0)
            model, optimizer = manager.offload(model, trained(model), params="nvme", **self.options)
            while len(found) < steps:
                found.append(train_step(model, optimizer).item())
        return found


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_run_goes_on_wherever_the_file_is_meanwhile(run: Run) -> None:
    plain = copy.deepcopy(run.model)
    torch.manual_seed(0)
    optimizer = trained(plain)
    expected = [train_step(plain, optimizer).item() for _ in range(4)]
    found = run.train(2)
    assert verify(run.directory)[0].faults == []
    moved = shutil.move(run.path, run.directory / "moved.safetensors")
    faults = verify(run.directory)[0].faults
    assert [fault.path for fault in faults] == [str(run.path)]
    run.options["frozen_from"] = moved
    assert found + run.train(2) == expected
    assert found_in(run.directory / "rank-0-of-1", frozen(plain)) == []


def test_a_run_that_goes_on_after_a_restart_of_the_system(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """All checksums are compared then; what is lent has none."""
    run.train(1)
    monkeypatch.setattr("swapper.checkpoint.resume.boot_id", lambda: "another one")
    assert run.train(1)


def test_another_file_is_refused(run: Run) -> None:
    run.train(1)
    os.utime(run.path, ns=(1, 1))
    assert any("changed since the commit" in fault.what for fault in verify(run.directory)[0].faults)
    with pytest.raises(
        swapper.CheckpointError, match=r"reads frozen parameters from .*base.safetensors as it was then"
    ):
        run.train(1)


def test_a_run_that_goes_on_must_be_given_the_file(run: Run) -> None:
    run.train(1)
    run.options.clear()
    with pytest.raises(swapper.CheckpointError, match=r"base.safetensors: say frozen_from="):
        run.train(1)


def test_a_run_that_has_its_own_copy_goes_on_with_that(run: Run) -> None:
    options, run.options = run.options, {}
    run.train(1)
    run.options = options
    with pytest.raises(swapper.CheckpointError, match=r"leave frozen_from= \(.*base.safetensors\) out"):
        run.train(1)


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(directory: Path, model: nn.Module, error: type[Exception], match: str, **options: Any) -> None:
    """Offload; assert that it is refused, that the model is as it was, and that nothing is left in the directory."""
    before = {name: p if p.is_meta else p.detach().clone() for name, p in model.named_parameters()}
    optimizer = adamw([p for p in model.parameters() if p.requires_grad] or [nn.Parameter(torch.zeros(1))])
    with swapper.SwapManager(directory, "16MiB") as manager:
        with pytest.raises(error, match=match):
            manager.offload(model, optimizer if any(p.requires_grad for p in model.parameters()) else None, **options)
        assert list(manager._directory.path.glob("*.swap")) == []
    assert {name for name, p in model.named_parameters() if p.is_meta} == {n for n, p in before.items() if p.is_meta}


def test_other_values_than_the_file_has_are_refused(tmp_path: Path) -> None:
    model = half_frozen()
    path = saved(model, tmp_path / "base.safetensors")
    with torch.no_grad():
        model.blocks[2].down.weight.view(-1)[-1] += 1
    match = r"blocks.2.down.weight has other values in the model than in .*base.safetensors"
    refused(tmp_path, model, swapper.CheckpointError, match, params="nvme", frozen_from=path)


def test_a_file_that_lacks_some_is_refused(tmp_path: Path) -> None:
    model = half_frozen()
    saved(model, path := tmp_path / "base.safetensors")
    tensors = load_file(path)
    save_file({n: t for n, t in tensors.items() if not n.startswith("blocks.3")}, path)
    match = r"lacks 2 of the model's 19 frozen parameters: blocks.3.up.weight, blocks.3.down.weight. Map its names"
    refused(tmp_path, model, swapper.CheckpointError, match, frozen_from=path)
    refused(tmp_path, model, swapper.CheckpointError, "lacks 19", frozen_from=path, rename=lambda name: "x." + name)


def test_another_shape_or_dtype_is_refused(tmp_path: Path) -> None:
    model = half_frozen()
    tensors = load_file(saved(model, path := tmp_path / "base.safetensors"))
    for wrong in (tensors["head.weight"].bfloat16(), tensors["head.weight"][:-1].clone()):
        save_file({**tensors, "head.weight": wrong}, path)
        match = (
            r"frozen parameter head.weight is of torch.float32 \[512, 128\], and 'head.weight' in .*base.safetensors of"
        )
        refused(tmp_path, model, swapper.CheckpointError, match, frozen_from=path)


def test_what_is_not_one_run_of_bytes_is_refused(tmp_path: Path) -> None:
    model = half_frozen()
    state = {**model.state_dict(), "head.weight": model.head.weight.detach().T.contiguous().T}
    torch.save(state, path := tmp_path / "base.pt")
    match = r"'head.weight', frozen parameter head.weight, is not one run of bytes in .*base.pt: make one file"
    refused(tmp_path, model, swapper.CheckpointError, match, frozen_from=path)


def test_options_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    path = saved(model := Net(), tmp_path / "base.safetensors")
    refused(tmp_path, model, swapper.ConfigError, "the model has none: requires_grad_", frozen_from=path)
    refused(tmp_path, half_frozen(), swapper.ConfigError, "say both, or none", rename={})
    refused(
        tmp_path, half_frozen(), swapper.IoError, "nothing.safetensors", frozen_from=tmp_path / "nothing.safetensors"
    )


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    model = half_frozen()
    path = saved(model, tmp_path / "base.safetensors")
    os.truncate(path, path.stat().st_size - 1)
    refused(tmp_path, model, swapper.CheckpointError, "base.safetensors", frozen_from=path)


def test_what_has_no_values_anywhere_is_refused(tmp_path: Path) -> None:
    path = saved(half_frozen(), tmp_path / "base.safetensors")
    with torch.device("meta"):
        model = half_frozen()
    refused(tmp_path, model, swapper.UnsupportedError, "norm.weight is on the meta device", frozen_from=path)
    with swapper.without_weights():
        model = Net().requires_grad_(False)
    model.register_buffer("scale", torch.zeros(1, device="meta"))
    refused(
        tmp_path,
        model,
        swapper.UnsupportedError,
        "buffer scale is on the meta device, and frozen_from",
        frozen_from=path,
    )


@pytest.mark.parametrize("change", ["touched", "cut off", "removed"])
def test_a_file_that_changes_underneath_ends_the_run_at_its_next_use(tmp_path: Path, change: str) -> None:
    model = half_frozen()
    path = saved(model, tmp_path / "base.safetensors")
    with swapper.SwapManager(tmp_path, "8MiB") as manager:
        model, optimizer = manager.offload(model, trained(model), params="nvme", frozen_from=path)
        train_step(model, optimizer)
        loss = loss_of(model, tokens())
        loss.backward()
        if change == "touched":
            os.utime(path, ns=(1, 1))
        elif change == "cut off":
            os.truncate(path, path.stat().st_size // 2)
        else:
            path.unlink()
        for use in (optimizer.step, lambda: model(tokens()), lambda: manager.snapshot(tmp_path / "x.pt")):
            with pytest.raises(swapper.CheckpointError, match=r"base.safetensors .*frozen parameters are read from it"):
                use()
        del loss
        assert manager.step == 1


def test_a_read_that_fails_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off between the look at it and the read."""
    model = half_frozen()
    path = saved(model, tmp_path / "base.safetensors")
    monkeypatch.setattr("swapper.train.frozen.FrozenFiles.check_unchanged", lambda self: None)
    optimizer = trained(model)
    budget = smallest_budget(tmp_path, model, optimizer, params="nvme", frozen_from=path)
    with swapper.SwapManager(tmp_path, budget, commit_every=None) as manager:
        model, optimizer = manager.offload(model, optimizer, params="nvme", frozen_from=path)
        send_away(manager)
        os.truncate(path, 4096)
        with pytest.raises(swapper.IoError, match=r"base.safetensors"):
            model(tokens())

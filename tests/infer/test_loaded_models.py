"""Users' changes of a model that was loaded by swapper.load, and their results."""

from __future__ import annotations

import copy
import os
import threading
import zlib

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import swapper
from infer.small import BUDGET, CONFIG, TOKENS, make, on_meta, run
from swapper.bench.plain import Gpt


@pytest.fixture
def model(path):
    model = swapper.load(on_meta(), path, host_memory=BUDGET)
    yield model
    if not model.head.weight.is_meta:
        swapper.loaded(model).unload()


def test_a_model_on_the_cpu_keeps_its_parameter_objects(path, reference):
    torch.manual_seed(1)
    model = Gpt(CONFIG).eval()
    parameters = list(model.parameters())
    swapper.load(model, path, host_memory=BUDGET)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(run(model), run(reference))
    swapper.loaded(model).unload()


def test_state_dict_maps_the_file_and_reads_nothing(model, reference):
    swapper.loaded(model)._streaming.engine.drain()  # of what is read ahead
    before = swapper.loaded(model).counters.bytes_read
    state = model.state_dict()
    assert state.keys() == reference.state_dict().keys()
    assert swapper.loaded(model).counters.bytes_read == before
    for name, tensor in reference.state_dict().items():
        assert torch.equal(state[name], tensor), name


def test_writing_into_the_state_dict_does_not_change_the_file(model, path, reference):
    content = path.read_bytes()
    model.state_dict()["head.weight"].zero_()
    assert path.read_bytes() == content
    assert torch.equal(run(model), run(reference))


@pytest.mark.parametrize(
    "move", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.to("meta"), lambda m: m.head.double()]
)
def test_moving_is_refused_and_changes_nothing(model, reference, move):
    with pytest.raises(swapper.StateError, match="cannot be moved or converted"):
        move(model)
    assert torch.equal(run(model), run(reference))


READS = {
    "sum": lambda p: p.sum(),
    "norm": torch.norm,
    "linear": lambda p: torch.nn.functional.linear(torch.ones(2, p.shape[1]), p),
    "data": lambda p: p.data * 2,
    "view": lambda p: p.view(-1)[3:9].clone(),
    "view of view": lambda p: p.t()[2].sum(),
    "cat": lambda p: torch.cat([p.flatten(), p.data.view(-1)]),
    "itself": lambda p: p.contiguous().clone(),
    "deepcopy": copy.deepcopy,
    "form": lambda p: torch.tensor(p.T.shape + p.data.shape + p.new_zeros(3).shape),
    "like": torch.zeros_like,
    "dropout that does nothing": lambda p: torch.nn.functional.dropout(p, 0.5, training=False) + 1,
}


@pytest.mark.parametrize("read", READS)
def test_a_weight_that_is_away_is_read_from_the_file(model, reference, read):
    for name, weight in reference.named_parameters():
        if weight.dim() == 2:
            assert torch.equal(READS[read](model.get_parameter(name)), READS[read](weight)), name


CHANGES = {
    "add_": lambda p: p.add_(1),
    "data": lambda p: p.data.mul_(2),
    "view": lambda p: p.view(-1)[3:9].zero_(),
    "item": lambda p: p.__setitem__(0, 1.0),
    "dropout": lambda p: torch.nn.functional.dropout(p, 0.5, training=False).add_(1),
    "out": lambda p: torch.add(p, 1, out=p.data),
    "copy": lambda p: p.copy_(p.detach() + 1),
    "init": torch.nn.init.zeros_,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changing_a_weight_that_is_away_is_refused(model, reference, change):
    with torch.no_grad(), pytest.raises(swapper.SwapperError, match=r"head\.weight"):
        CHANGES[change](model.head.weight)
    assert torch.equal(model.head.weight.clone(), reference.head.weight)
    assert torch.equal(run(model), run(reference))


def test_a_state_dict_of_the_same_values_may_be_loaded(model, reference):
    model.load_state_dict(reference.state_dict())
    state = {**reference.state_dict(), "head.weight": torch.zeros_like(reference.head.weight)}
    with pytest.raises(RuntimeError, match=r"head\.weight.*loaded for inference"):
        model.load_state_dict(state)
    assert torch.equal(run(model), run(reference))


def test_training_is_refused(model, reference):
    model.head.weight.requires_grad_(True)
    with pytest.raises(swapper.StateError, match=r"swapper\.SwapManager"):
        model(TOKENS)
    model.head.weight.requires_grad_(False)
    assert torch.equal(run(model), run(reference))


def test_a_gradient_to_an_input_is_refused(model):
    hidden = torch.randn(1, 4, CONFIG.width, requires_grad=True)
    with pytest.raises(swapper.StateError, match=r"gradient would have to flow.*swapper\.SwapManager"):
        model.layers[0](hidden)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_every_mode_of_autograd_gives_the_same(model, reference, mode):
    expected = run(reference)
    for _ in range(2):
        with mode():
            assert torch.equal(model(TOKENS), expected)


def test_parts_of_a_model_run_by_themselves(model, reference):
    hidden = torch.randn(1, 4, CONFIG.width)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model.layers[2](hidden), reference.layers[2](hidden))
            assert torch.equal(model.head(hidden), reference.head(hidden))


@pytest.mark.parametrize("budget", [BUDGET, "1GiB"])
def test_threads_take_turns(path, reference, budget):
    expected = run(reference)
    model = swapper.load(on_meta(), path, host_memory=budget)
    found = []

    def work():
        for _ in range(4):
            found.append(torch.equal(run(model), expected))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 16
    swapper.loaded(model).unload()


def test_an_exception_in_a_forward_leaves_nothing_behind(model, reference):
    def fail(module, args):
        raise ValueError("from outside")

    handle = model.layers[3].mlp_out.register_forward_pre_hook(fail)
    for _ in range(3):
        with pytest.raises(ValueError, match="from outside"):
            run(model)
    handle.remove()
    assert torch.equal(run(model), run(reference))


def test_an_interrupt_in_a_forward_leaves_nothing_behind(model, reference):
    def interrupt(module, args):
        raise KeyboardInterrupt

    handle = model.layers[3].mlp_out.register_forward_pre_hook(interrupt)
    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            run(model)
    handle.remove()
    with torch.no_grad():
        hidden = torch.randn(1, 4, CONFIG.width)
        assert torch.equal(
            model.layers[1](hidden), reference.layers[1](hidden)
        )  # not the whole model: still no stale leases
    assert torch.equal(run(model), run(reference))


def test_a_file_that_changes_is_noticed_at_the_next_pass(model, path):
    run(model)
    os.utime(path, ns=(1, 1))
    with pytest.raises(swapper.CheckpointError, match="was changed while its weights are in use"):
        run(model)


@pytest.mark.parametrize("is_known", [True, False], ids=["verified before", "not verified"])
@pytest.mark.parametrize("change", ["its time", "its time, twice", "a byte", "another file of the same bytes"])
def test_a_new_time_alone_does_not_stop_a_model_whose_files_were_verified(model, path, reference, change, is_known):
    before = path.read_bytes()
    checksums = swapper.loaded(model).verify() if is_known else None
    expected = run(model)
    if change == "another file of the same bytes":
        path.unlink()
    if not change.startswith("its time"):
        path.write_bytes(before[:-1] + bytes([before[-1] ^ (change == "a byte")]))
    for number in range(2 if change == "its time, twice" else 1):
        os.utime(path, ns=(1, 1 + number))
        if is_known and change.startswith("its time"):
            assert torch.equal(run(model), expected)
            assert torch.equal(model.state_dict()["head.weight"], reference.head.weight)
            assert torch.equal(model.head.weight.sum(), reference.head.weight.sum())
            assert swapper.loaded(model).verify() == checksums
            continue
        for use in (lambda: run(model), model.state_dict, swapper.loaded(model).verify):
            with pytest.raises(swapper.CheckpointError, match="was changed while its weights are in use"):
                use()


def test_a_weight_that_the_forward_changes_is_an_error(tmp_path):
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Embedding(4096, 256, max_norm=0.5), nn.Linear(256, 8192))
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(4096, 256, max_norm=0.5), nn.Linear(256, 8192))
    swapper.load(model, tmp_path / "model.safetensors", host_memory="11MiB")
    with pytest.raises(swapper.StateError, match=r"0\.weight was changed in a forward"):
        model(torch.arange(4))


def test_a_budget_below_the_largest_module_says_what_is_needed(path):
    with pytest.raises(swapper.BudgetError, match="this model needs at least") as refusal:
        swapper.load(on_meta(), path, host_memory="100KiB")
    least = int(str(refusal.value).split("(")[1].split(" bytes")[0])
    model = swapper.load(on_meta(), path, host_memory=least)
    assert torch.equal(run(model), run(make()))
    swapper.loaded(model).unload()


def test_a_model_can_be_loaded_once_only(model, path):
    with pytest.raises(swapper.StateError, match="paged already"):
        swapper.load(model, path, host_memory=BUDGET)


# --- names, shapes, dtypes --------------------------------------------------------------------------------------------


def small():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def test_missing_and_unexpected_names_are_listed(tmp_path):
    state = small().state_dict()
    state["extra"] = state.pop("0.bias")
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(swapper.CheckpointError, match=r"missing: 0\.bias; unexpected: extra"):
        swapper.load(small(), tmp_path / "model.safetensors", host_memory="8MiB")
    model = small()
    bias = model[0].bias.detach().clone()
    swapper.load(model, tmp_path / "model.safetensors", host_memory="8MiB", strict=False)
    assert torch.equal(model[0].bias, bias)
    with torch.device("meta"):
        model = small()
    with pytest.raises(swapper.UnsupportedError, match=r"0\.bias is not in the checkpoint"):
        swapper.load(model, tmp_path / "model.safetensors", host_memory="8MiB", strict=False)
    with pytest.raises(swapper.ConfigError, match="strict='no' must be True or False"):
        swapper.load(model, tmp_path / "model.safetensors", host_memory="8MiB", strict="no")


@pytest.mark.whole
@pytest.mark.parametrize("rename", [{"extra": "0.bias"}, lambda name: {"extra": "0.bias"}.get(name, name)])
def test_names_can_be_mapped(tmp_path, rename):
    reference = small().eval()
    reference[1].running_mean.normal_()
    state = reference.state_dict()
    state["extra"] = state.pop("0.bias")
    save_file(state, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = small().eval()
    swapper.load(model, tmp_path / "model.safetensors", host_memory="8MiB", rename=rename)
    x = torch.randn(3, 4)
    assert torch.equal(model(x), reference(x))
    assert model[1].num_batches_tracked.item() == 0


@pytest.mark.whole
@pytest.mark.parametrize("rename", [["0.bias"], "0.bias", lambda _: 5])
def test_what_is_no_map_of_names_is_refused(tmp_path, rename):
    save_file(small().state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(swapper.ConfigError, match="rename"):
        swapper.load(small(), tmp_path / "model.safetensors", host_memory="8MiB", rename=rename)


def test_another_shape_is_refused(tmp_path):
    save_file({**small().state_dict(), "0.weight": torch.zeros(4, 5)}, tmp_path / "model.safetensors")
    with pytest.raises(swapper.CheckpointError, match=r"0\.weight has the shape \[4, 4\] in the model and \[4, 5\]"):
        swapper.load(small(), tmp_path / "model.safetensors", host_memory="8MiB")


@pytest.mark.parametrize("stored, used", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_weights_are_converted_on_the_way_in(tmp_path, stored, used):
    reference = make(stored)
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    model = swapper.load(on_meta(), tmp_path / "model.safetensors", host_memory="8MiB", dtype=used)
    assert swapper.loaded(model).read_bytes_a_pass > 0
    reference = reference.to(used)
    for _ in range(3):
        assert torch.equal(run(model), run(reference))
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in reference.state_dict().items())
    swapper.loaded(model).unload()


def test_tied_weights_stay_tied(tmp_path):
    torch.manual_seed(0)
    reference = Gpt(CONFIG).eval()
    reference.head.weight = reference.token_embedding.weight
    state = reference.state_dict()
    del state["head.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Gpt(CONFIG).eval()
        model.head.weight = model.token_embedding.weight
    swapper.load(model, tmp_path / "model.safetensors", host_memory=BUDGET)
    assert model.head.weight is model.token_embedding.weight
    for _ in range(3):
        assert torch.equal(run(model), run(reference))
    swapper.loaded(model).unload()


@pytest.mark.parametrize(
    "where, prefix", [(None, ""), ("model", ""), ("state_dict", "model."), ("model", "_orig_mod.")]
)
def test_a_torch_checkpoint_is_read_in_place(tmp_path, reference, where, prefix):
    """Also where a training has put the model: as Lightning does, or with a name that torch.compile or DDP gave it."""
    state = {prefix + name: tensor for name, tensor in reference.state_dict().items()}
    torch.save(state if where is None else {where: state, "step": 3}, tmp_path / "model.pt")
    model = swapper.load(on_meta(), tmp_path / "model.pt", host_memory=BUDGET)
    assert swapper.loaded(model).read_bytes_a_pass > 0
    for _ in range(3):
        assert torch.equal(run(model), run(reference))
    swapper.loaded(model).unload()


def test_a_snapshot_of_a_training_is_read_in_place(tmp_path):
    torch.manual_seed(0)
    model = Gpt(CONFIG)
    reference = Gpt(CONFIG).eval()
    (tmp_path / "run").mkdir()
    with swapper.SwapManager(tmp_path / "run", host_memory="80MiB") as manager:
        model, optimizer = manager.offload(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        model(TOKENS, TOKENS).backward()
        optimizer.step()
        manager.snapshot(tmp_path / "snapshot.pt")
    reference.load_state_dict(torch.load(tmp_path / "snapshot.pt", mmap=True)["model"])
    loaded = swapper.load(on_meta(), tmp_path / "snapshot.pt", host_memory=BUDGET)
    for _ in range(2):
        assert torch.equal(run(loaded), run(reference))
    swapper.loaded(loaded).unload()


def test_a_transposed_weight_of_a_torch_checkpoint_is_a_view(tmp_path):
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    reference[0].weight = nn.Parameter(reference[0].weight.detach().t().contiguous().t())
    torch.save(reference.state_dict(), tmp_path / "model.pt")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    swapper.load(model, tmp_path / "model.pt", host_memory="4MiB")
    x = torch.randn(3, 512)
    with torch.no_grad():
        assert torch.equal(model(x), reference(x))
    assert model[0].weight.stride() == (1, 512)
    swapper.loaded(model).unload()


class Rotary(nn.Module):
    """With a buffer that no checkpoint holds."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.map.weight
        self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(8) / 8), persistent=False)

    def forward(self, x):
        return self.tied(self.map(x)) * self.frequencies


def test_buffers_that_no_checkpoint_holds_are_made_properly(tmp_path):
    torch.manual_seed(0)
    reference = Rotary()
    state = reference.state_dict()
    del state["tied.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Rotary()
    with pytest.raises(swapper.UnsupportedError, match=r"frequencies are not in the checkpoint.*without_weights"):
        swapper.load(model, tmp_path / "model.safetensors", host_memory="8MiB")
    with swapper.without_weights():
        model = Rotary()
    assert all(p.is_meta for p in model.parameters())
    assert model.tied.weight is model.map.weight
    swapper.load(model, tmp_path / "model.safetensors", host_memory="8MiB")
    x = torch.randn(3, 8)
    assert torch.equal(model(x), reference(x))
    assert not Rotary().map.weight.is_meta


class Initialised(nn.Module):
    """A buffer gets initial values too, and a parameter some that it needs no function of torch.nn.init for."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(8, 8)
        self.register_buffer("directions", nn.init.orthogonal_(torch.empty(8, 8)))
        nn.init.normal_(self.map.weight, std=0.02)
        self.map.bias.data.fill_(1)


def test_without_weights_initial_values_are_made_of_buffers_alone(run_python):
    torch.manual_seed(5)
    before = {name: getattr(nn.init, name) for name in dir(nn.init)}
    with swapper.without_weights():
        model = Initialised()
        torch.manual_seed(5)
        expected = torch.empty(8, 8)
        nn.init.orthogonal_(expected)
    assert model.map.weight.is_meta and torch.equal(model.directions, expected)  # no number was drawn for weights
    assert {name: getattr(nn.init, name) for name in dir(nn.init)} == before
    with pytest.raises(ZeroDivisionError), swapper.without_weights():
        _ = 1 / 0
    assert nn.init.normal_ is before["normal_"]
    done = run_python(
        """
        import sys
        import swapper
        from torch import nn

        swapper.without_weights
        before = set(sys.modules)
        with swapper.without_weights():
            nn.init.normal_(nn.Linear(8, 8).weight)
        print(sorted(set(sys.modules) - before))
        """
    )
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_a_change_without_a_trace_is_found_by_checksum(path):
    model = swapper.load(on_meta(), path, host_memory="6MiB")
    status = path.stat()
    found = swapper.loaded(model).verify()
    assert found == {path: zlib.crc32(path.read_bytes())} == swapper.loaded(model).verify()
    with path.open("r+b") as file:
        file.seek(status.st_size // 2)
        byte = file.read(1)[0]
        file.seek(status.st_size // 2)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(swapper.CheckpointError, match=r"CRC-32 .* size and time as before"):
        swapper.loaded(model).verify()
    os.utime(path)
    for look in (swapper.loaded(model).verify, lambda: model.state_dict()["layers.0.qkv.weight"]):
        with pytest.raises(swapper.CheckpointError, match="was changed"):
            look()
    swapper.loaded(model).unload()


def test_a_state_dict_is_no_source(reference):
    with pytest.raises(swapper.ConfigError, match="is a path, not a OrderedDict"):
        swapper.load(on_meta(), reference.state_dict())

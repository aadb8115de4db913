"""Of experts that are modules of their own, only those that tokens are routed to are read."""

from __future__ import annotations

import os
import weakref

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import swapper
from swapper import _C
from swapper.checkpoint.exporting import export
from swapper.formats.sources import open_source
from swapper.infer.experts import Experts, takes_single_experts
from swapper.infer.matching import Recipe
from swapper.infer.streaming import WeightFiles

WIDTH, EXPERTS = 256, 8


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.up(x)))


class Mixture(nn.Module):
    """Rows go to the expert that the row's first number says."""

    def __init__(self, holder):
        super().__init__()
        self.router = nn.Linear(WIDTH, WIDTH)
        experts = [Expert() for _ in range(EXPERTS)]
        self.experts = (
            nn.ModuleList(experts)
            if holder is nn.ModuleList
            else nn.ModuleDict({f"e{n}": e for n, e in enumerate(experts)})
        )

    def forward(self, x, chosen):
        x = self.router(x)
        out = torch.zeros_like(x)
        experts = list(self.experts.values()) if isinstance(self.experts, nn.ModuleDict) else self.experts
        for number in chosen.unique().tolist():
            rows = chosen == number
            out[rows] = experts[number](x[rows])
        return out


class Model(nn.Module):
    def __init__(self, holder=nn.ModuleList):
        super().__init__()
        self.layers = nn.ModuleList([Mixture(holder) for _ in range(3)])

    def forward(self, x, chosen):
        for layer in self.layers:
            x = x + layer(x, chosen)
        return x


def saved(tmp_path, holder=nn.ModuleList):
    torch.manual_seed(0)
    reference = Model(holder)
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    return reference, tmp_path / "model.safetensors"


def empty(holder=nn.ModuleList):
    with torch.device("meta"):
        return Model(holder)


def rows(*chosen):
    torch.manual_seed(1)
    return torch.randn(len(chosen), WIDTH), torch.tensor(chosen)


ONE_EXPERT = 2 * 2 * WIDTH * WIDTH * 4
ROUTERS = 3 * WIDTH * WIDTH * 4


@pytest.mark.parametrize("holder", [nn.ModuleList, nn.ModuleDict])
def test_only_the_experts_that_are_used_are_read(tmp_path, holder):
    reference, path = saved(tmp_path, holder)
    model = swapper.load(empty(holder), path, host_memory="6MiB")
    loaded = swapper.loaded(model)
    with torch.no_grad():
        for number in range(2 * EXPERTS):
            batch = rows(number % EXPERTS)
            before = loaded.counters.bytes_read
            assert torch.equal(model(*batch), reference(*batch))
            loaded._streaming.engine.drain()
            read = loaded.counters.bytes_read - before
            assert read <= 3 * ONE_EXPERT + 3 * ROUTERS + 100_000  # and not eight experts
        batch = rows(0, 3, 5, 5, 7, 1)
        assert torch.equal(model(*batch), reference(*batch))
    loaded.unload()


def test_those_used_last_stay_as_far_as_the_budget_goes(tmp_path):
    reference, path = saved(tmp_path)
    model = swapper.load(empty(), path, host_memory="15MiB")
    loaded = swapper.loaded(model)
    with torch.no_grad():
        first, second = rows(2), rows(4, 4)
        for batch in (first, second, first):
            model(*batch)
        loaded._streaming.engine.drain()
        before = loaded.counters.bytes_read
        for _ in range(4):
            for batch in (first, second):
                assert torch.equal(model(*batch), reference(*batch))
        loaded._streaming.engine.drain()
        assert loaded.counters.bytes_read - before < ONE_EXPERT
        batch = rows(*range(EXPERTS))  # more than there is room for
        for _ in range(2):
            assert torch.equal(model(*batch), reference(*batch))
        assert loaded._experts._used_bytes <= loaded._experts._cache_bytes
    loaded.unload()


def test_batches_that_go_together_share_experts_and_failures_leave_nothing_behind(tmp_path):
    reference, path = saved(tmp_path)
    model = swapper.load(empty(), path, host_memory="6MiB")
    loaded = swapper.loaded(model)
    batches = [rows(0, 1), rows(1, 2), rows(2, 0), rows(7)]
    with torch.no_grad():
        found = loaded.map(lambda batch: model(*batch), batches)
        assert all(torch.equal(a, reference(*b)) for a, b in zip(found, batches, strict=True))
        handle = model.layers[1].experts[2].down.register_forward_pre_hook(lambda *_: 1 / 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                model(*rows(1, 2))
        handle.remove()
        assert not any(part.leases for part in loaded._experts._cache.values())
        assert torch.equal(model(*rows(1, 2)), reference(*rows(1, 2)))
    assert torch.equal(model.layers[0].experts[0].up.weight.sum(), reference.layers[0].experts[0].up.weight.sum())
    assert torch.equal(model.state_dict()["layers.2.experts.7.up.weight"], reference.layers[2].experts[7].up.weight)
    loaded.unload()
    assert all(parameter.is_meta for parameter in model.parameters())


def test_experts_in_another_dtype_or_quantised(tmp_path):
    _, path = saved(tmp_path)
    export(path, tmp_path / "quantised", "safetensors", quantize="int4")
    for source, options in ((path, {"dtype": torch.bfloat16}), (tmp_path / "quantised", {})):
        model = swapper.load(empty(), source, host_memory="6MiB", **options)
        same = Model().to(options.get("dtype"))
        same.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
        x, chosen = rows(0, 3, 5, 5, 7, 1)
        x = x.to(options.get("dtype"))
        with torch.no_grad():
            for _ in range(2):
                assert torch.equal(model(x, chosen), same(x, chosen))
        swapper.loaded(model).unload()


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "computed at each use"])
def test_results_that_are_computed_at_each_use_take_one_memory_in_turn(tmp_path, is_kept):
    _, path = saved(tmp_path)
    export(path, tmp_path / "quantised", "safetensors", quantize="int4")
    source, dtype = (path, torch.bfloat16) if is_kept else (tmp_path / "quantised", None)
    model = swapper.load(empty(), source, host_memory="8MiB", dtype=dtype)
    made, places = swapper.loaded(model)._made, []
    begin = torch.frombuffer(made._memory, dtype=torch.uint8).data_ptr()
    for layer in model.layers:
        for expert in layer.experts:
            expert.up.register_forward_pre_hook(lambda module, _: places.append(module.weight.data_ptr() - begin))
    with torch.no_grad():
        for _ in range(2):
            x, chosen = rows(0, 3, 5, 7)
            model(x.to(dtype), chosen)
    assert len(places) == 24 and {0 <= place < made._nbytes for place in places} == {not is_kept}
    swapper.loaded(model).unload()


def test_an_expert_that_could_not_be_read_is_read_again(tmp_path):
    reference, path = saved(tmp_path)
    model = swapper.load(empty(), path, host_memory="6MiB")
    loaded = swapper.loaded(model)
    files, batch = loaded._streaming.store, rows(3, 5)
    engine, files._engine = files._engine, _C.Engine(chaos={"seed": 1, "eio": 1})
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(swapper.IoError, match="Input/output error"):
                model(*batch)
        files._engine = engine
        assert torch.equal(model(*batch), reference(*batch))
    loaded.unload()


def test_experts_may_be_forgotten_while_they_are_read(tmp_path):
    _, path = saved(tmp_path)
    source = open_source(path)
    gate, other_end = os.pipe()
    engines = [_C.Engine(), _C.Engine(chaos={"until": gate})]
    files = [WeightFiles(engine, source, {}) for engine in engines]
    owners = []

    def read(stored, offset, memory):
        owners.append(weakref.ref(memory))
        return files["layers.1" in stored.name].read_into(stored.path, stored.offset + offset, memory)

    experts = Experts(read, 4 << 20)
    used, ahead = (Recipe((source.tensors[f"layers.{n}.experts.0.up.weight"],), None, torch.float32) for n in (0, 1))
    with os.fdopen(other_end, "wb"):  # before it is closed nothing that is read ahead is over
        experts.lease([(("group", 0, 1), used)], [(("group", 1, 2), ahead)])
        del experts
        assert owners[1]() is not None
    engines[1].drain()
    assert [owner() for owner in owners] == [None, None]
    os.close(gate)
    for each in (*files, *engines):
        each.close()


def test_where_a_later_read_cannot_begin_nothing_stays_leased(tmp_path):
    _, path = saved(tmp_path)
    source = open_source(path)
    engine = _C.Engine()
    files = WeightFiles(engine, source, {})

    def read(stored, offset, memory):
        if "layers.1" in stored.name:
            raise swapper.IoError("read", str(path), offset, 0, 5, "cannot begin")
        return files.read_into(stored.path, stored.offset + offset, memory)

    experts = Experts(read, 4 << 20)
    stored = [source.tensors[f"layers.{n}.experts.0.up.weight"] for n in range(2)]
    recipes = [(("group", n, 0), Recipe((tensor,), None, torch.float32)) for n, tensor in enumerate(stored)]
    with pytest.raises(swapper.IoError, match="cannot begin"):
        experts.lease(recipes, [])
    assert [part.leases for part in experts._cache.values()] == [0]
    experts.forget()
    files.close()
    engine.close()


def test_an_expert_that_a_forward_changes_is_refused_and_undone(tmp_path):
    reference, path = saved(tmp_path)
    model = swapper.load(empty(), path, host_memory="15MiB")
    up = model.layers[1].experts[2].up
    with torch.no_grad():
        for _ in range(2):
            hook = up.register_forward_pre_hook(lambda module, _: module.weight.mul_(2))
            with pytest.raises(swapper.StateError, match=r"layers\.1\.experts\.2\.up\.weight was changed"):
                model(*rows(2))
            hook.remove()
            assert torch.equal(model(*rows(2)), reference(*rows(2)))
    swapper.loaded(model).unload()


class Stacked(nn.Module):
    """As transformers' mixtures: one parameter has all experts."""

    def __init__(self):
        super().__init__()
        self.maps = nn.Parameter(torch.randn(4 * EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)
        self.change = False

    def forward(self, x, number):
        weight = self.maps[number]
        if self.change:
            weight.mul_(2)
        return x @ self.maps[number]


def test_an_expert_of_one_parameter_that_a_forward_changes_is_refused_and_undone(tmp_path):
    reference = nn.ModuleDict({"experts": Stacked()})
    torch.save(reference.state_dict(), tmp_path / "m.pt")
    with torch.device("meta"):
        model = nn.ModuleDict({"experts": Stacked()})
    swapper.load(model, tmp_path / "m.pt", host_memory="6MiB")
    x = torch.randn(3, WIDTH)
    with torch.no_grad():
        expected = reference["experts"](x, 2)
        assert torch.equal(model["experts"](x, 2), expected)
        model["experts"].change = True
        with pytest.raises(swapper.StateError, match=r"expert 2 of a parameter of shape .* was changed"):
            model["experts"](x, 2)
        model["experts"].change = False
        assert torch.equal(model["experts"](x, 2), expected)
    swapper.loaded(model).unload()


class Indexes(nn.Module):
    """Experts in one parameter, of which a forward takes one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[expert] @ self.weight[expert] for expert in range(len(x))])


class TakesAll(Indexes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, self.weight)


class TakesAllByAnOperator(Indexes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def test_experts_that_a_forward_takes_as_a_whole_are_not_read_one_by_one() -> None:
    """Else a budget would be named that has no room for all of them."""
    assert [takes_single_experts(cls()) for cls in (Indexes, TakesAll, TakesAllByAnOperator)] == [True, False, False]

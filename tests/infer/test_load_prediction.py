"""A plan of a load says what passes read and how long they take, and reads and changes nothing itself."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import swapper
from infer.small import BUDGET, TOKENS, make, on_meta, total_bytes
from infer.test_experts import EXPERTS, Model
from swapper.checkpoint.exporting import export
from swapper.forecast import load
from swapper.paging.virtual_drive import PagingCosts

RATE = 10**6  # bytes a second: slow enough that computing does not count


@pytest.fixture
def path(tmp_path):
    save_file(make().state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("budget", [BUDGET, "12MiB", "64MiB"])
def test_a_predicted_pass_reads_what_a_pass_reads(path, budget):
    model = on_meta()
    parameters = list(model.parameters())
    plan = swapper.plan_load(model, path, host_memory=budget)
    predicted = plan.predict(32, drive_read=RATE)
    assert all(mine is given for mine, given in zip(model.parameters(), parameters, strict=True))
    swapper.load(model, path, host_memory=budget)
    loaded = swapper.loaded(model)
    looked_up = (
        sum(m.weight.nbytes for m in (model.token_embedding, model.position_embedding)) if budget == BUDGET else 0
    )
    assert predicted.token.read_bytes == loaded.read_bytes_a_pass
    assert abs(predicted.first.read_bytes - (total_bytes(make()) - looked_up)) < 1 << 20  # small ones stay
    for step in (predicted.first, predicted.token):
        assert step.wall_s == pytest.approx(step.read_bytes / RATE, rel=0.1, abs=0.3)
    assert sum(plan.memory.values()) <= loaded.counters.pool_bytes + (4 << 20)
    with torch.no_grad():
        assert torch.equal(model(TOKENS), make()(TOKENS))
    assert "each token" in str(predicted)
    loaded.unload()


def test_weights_in_few_bits_are_read_in_few_bytes_and_computed(path, tmp_path):
    export(path, tmp_path / "int8.safetensors", "safetensors", quantize="int8")
    plain, coded = (
        swapper.plan_load(on_meta(), source, host_memory="3MiB").predict(32, drive_read=10**12)
        for source in (path, tmp_path / "int8.safetensors")
    )
    assert coded.first.read_bytes < 0.5 * plain.first.read_bytes
    assert coded.token.total.computing_s > 0


def test_weights_that_stay_take_time_at_each_use(path, tmp_path, monkeypatch):
    export(path, tmp_path / "int8.safetensors", "safetensors", quantize="int8")
    monkeypatch.setattr(load, "paging_costs", lambda has_checksums: PagingCosts(use_s=10.0))
    plan = swapper.plan_load(on_meta(), tmp_path / "int8.safetensors", host_memory="64MiB")
    predicted = plan.predict(4, drive_read=RATE)
    streams = [group for group in plan.fitting.plan.groups if group.runs]
    assert predicted.token.read_bytes == 0
    assert predicted.token.wall_s == pytest.approx(10 * len(streams), rel=0.1)
    assert predicted.first.wall_s < 10  # all of them are read


def test_what_is_read_by_parts_takes_the_drives_time_and_the_pool_is_all_there(path, tmp_path):
    export(path, tmp_path / "int8.safetensors", "safetensors", quantize="int8")
    plan = swapper.plan_load(on_meta(), tmp_path / "int8.safetensors", host_memory="4MiB")
    placement, cuts = plan.fitting.placement, plan.fitting.plan.cuts
    assert cuts and placement.frame_count and not placement.streamed
    assert plan.memory["pool"] == placement.pool_bytes  # also what the ends of pages leave free
    assert [sum(linear.part_bytes) for linear in cuts] == [linear.stored_bytes for linear in cuts]
    rate = RATE // 100
    token = plan.predict(32, drive_read=rate).token
    assert token.read_bytes == sum(linear.stored_bytes for linear in cuts)
    assert token.wall_s == pytest.approx(token.read_bytes / rate, rel=0.05)
    assert token.total.read_wait_s > 0.8 * token.wall_s  # it is no computing


def test_of_a_mixture_the_hit_rate_says_what_is_waited_for(tmp_path):
    save_file(Model().state_dict(), tmp_path / "model.safetensors")
    plan = swapper.plan_load(Model().to("meta"), tmp_path / "model.safetensors", host_memory="8MiB")
    with pytest.raises(swapper.ConfigError, match=r"experts=swapper\.ExpertUse\("):
        plan.predict(4, drive_read=RATE)
    all_read, half, none = (
        plan.predict(1, drive_read=RATE, experts=swapper.ExpertUse(experts=2, hit_rate=rate)).token
        for rate in (0.0, 0.5, 1.0)
    )
    experts_bytes = sum(p.nbytes for name, p in Model().named_parameters() if ".experts." in name and p.dim() == 2)
    assert all_read.read_bytes - none.read_bytes == pytest.approx(2 / EXPERTS * experts_bytes, rel=0.05)
    assert half.read_bytes - none.read_bytes == pytest.approx((all_read.read_bytes - none.read_bytes) / 2, abs=2)
    assert none.wall_s < half.wall_s < all_read.wall_s


@pytest.mark.whole
@pytest.mark.parametrize("wrong", [{"experts": 0, "hit_rate": 0.5}, {"experts": 2, "hit_rate": 1.5}], ids=str)
def test_an_impossible_use_of_experts_is_refused(wrong):
    with pytest.raises(swapper.ConfigError, match="give at least 1, and 0 to 1"):
        swapper.ExpertUse(**wrong)


def test_a_load_prediction_needs_the_drive_and_positive_numbers(path):
    plan = swapper.plan_load(on_meta(), path, host_memory=BUDGET)
    with pytest.raises(swapper.ConfigError, match=r"swapper tune.*drive_read="):
        plan.predict(32)
    for wrong in ({"tokens": 0}, {"tokens": 4, "batch": 0}):
        with pytest.raises(swapper.ConfigError, match="give a positive number"):
            plan.predict(**wrong, drive_read=RATE)
    with pytest.raises(swapper.ConfigError, match="could mean bits or bytes, of 1000 or 1024: say 7GB for bytes"):
        plan.predict(32, drive_read="7Gb/s")
    with pytest.raises(swapper.BudgetError):
        swapper.plan_load(on_meta(), path, host_memory="1MiB")

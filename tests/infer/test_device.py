"""A model whose kernels run on a device: the same outputs, within two budgets, each byte copied and read as often as is said."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import swapper
from infer.device_models import HOST, MIB, check, load, run
from infer.host_device import ORDERS, HostDevice, Stream
from infer.small import CONFIG, TOKENS, make, on_meta, total_bytes


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("budget, host", [(3, 3), (3, 12), (8, 3), (8, 1024), (16, 3), (1024, 3)])
def test_outputs_are_those_of_the_model_in_memory(saved, order, opened, budget, host):
    reference, device = make(), HostDevice(order)
    budget, host = budget * MIB, host * MIB
    model = load(saved(reference), device, opened, host=host, budget=budget)
    for _ in range(3):
        assert torch.equal(run(model), run(reference))
        assert torch.equal(run(model, TOKENS[:, :1]), run(reference, TOKENS[:, :1]))
    assert device.peak_bytes <= budget
    check(model)


@pytest.mark.parametrize("padding", [0, 2, 8, 40])
def test_tensors_are_aligned_on_the_device_wherever_the_file_has_them(saved, device, opened, padding):
    reference = make(torch.bfloat16)
    model = load(saved(reference, {"pad": "x" * padding}), device, opened, budget=2 * MIB, dtype=torch.bfloat16)
    seen = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda m, _: seen.append(m.weight.data_ptr() % 64))
    assert torch.equal(run(model), run(reference))
    assert set(seen) == {0}


def test_a_budget_for_all_of_it_gives_a_plain_model(saved, device, opened):
    reference = make()
    model = load(saved(reference), device, opened, budget=1 << 30)
    loaded = swapper.loaded(model)
    run(model)
    loaded._streaming.engine.drain()  # of what was read ahead for a second pass
    read, copied = loaded.counters.bytes_read, loaded.counters.uploaded_bytes
    assert loaded.read_bytes_a_pass == 0
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert torch.equal(run(model), run(reference))
    assert (loaded.counters.bytes_read, loaded.counters.uploaded_bytes) == (read, copied)


def test_what_the_device_can_hold_is_copied_once(saved, device, opened):
    reference = make()
    copied = []
    for budget in (3 * MIB, 8 * MIB, 12 * MIB, 16 * MIB):
        with swapper.loaded(load(saved(reference), device, opened, budget=budget)) as loaded:
            model = opened[-1]
            for _ in range(3):
                run(model)
            loaded._on_device.tier.finish()
            before = loaded.counters.uploaded_bytes
            for _ in range(4):
                run(model)
            copied.append((loaded.counters.uploaded_bytes - before) / 4)
    assert copied == sorted(copied, reverse=True)
    assert copied[0] > 0.8 * total_bytes(reference)
    assert copied[-1] < 0.5 * total_bytes(reference)


def test_what_host_memory_can_hold_of_the_rest_is_read_once(saved, device, opened):
    model = load(saved(make()), device, opened, host=1 << 30, budget=4 * MIB)
    loaded = swapper.loaded(model)
    assert loaded.read_bytes_a_pass == 0
    run(model)
    run(model)
    loaded._streaming.engine.drain()
    read, copied = loaded.counters.bytes_read, loaded.counters.uploaded_bytes
    run(model)
    rows_bytes = 2 * TOKENS.numel() * CONFIG.width * 4  # of the two embeddings, which look them up
    assert loaded.counters.bytes_read <= read + rows_bytes
    assert loaded.counters.uploaded_bytes > copied


def test_what_neither_holds_is_read_as_planned(saved, device, opened):
    model = load(saved(make()), device, opened, host=6 * MIB, budget=8 * MIB)
    loaded = swapper.loaded(model)
    for _ in range(2):
        run(model)
    before, passes = loaded.counters.bytes_read, 6
    for _ in range(passes):
        run(model)
    planned = passes * loaded.read_bytes_a_pass + loaded.counters.pool_bytes
    assert 0 < loaded.counters.bytes_read - before <= 1.02 * planned  # what is in flight when it is counted differs


def test_a_budget_that_is_too_small_is_refused_with_the_smallest_that_works(saved, device, opened):
    reference = make()
    path = saved(reference)
    with pytest.raises(swapper.BudgetError, match=r"device_memory=.* is too small.*raise device_memory") as refusal:
        load(path, device, opened, budget=100_000)
    smallest = int(str(refusal.value).split("(")[1].split(" bytes")[0])
    model = load(path, device, opened, budget=smallest)
    assert torch.equal(run(model), run(reference))
    assert device.peak_bytes <= smallest


def test_many_batches_go_through_each_group_together(saved, device, opened):
    reference = make()
    model = load(saved(reference), device, opened)
    loaded = swapper.loaded(model)
    run(model)
    batches = [TOKENS + number for number in range(4)]
    with torch.no_grad():
        for given, batch in zip(loaded.map(model, batches), batches, strict=True):
            assert torch.equal(given, reference(batch))
    check(model)


def test_two_models_on_one_device(saved, device, opened):
    reference = make()
    path = saved(reference)
    one, other = load(path, device, opened), load(path, device, opened, budget=9 * MIB)
    for _ in range(3):
        assert torch.equal(run(one), run(reference))
        assert torch.equal(run(other), run(reference))
    swapper.loaded(one).unload()
    assert torch.equal(run(other), run(reference))
    assert device.peak_bytes <= 13 * MIB


def test_a_user_who_changes_streams(saved, device, opened):
    reference = make()
    model = load(saved(reference), device, opened)
    for _ in range(4):
        with device.on(Stream(is_compute=True)):
            assert torch.equal(run(model), run(reference))
        assert torch.equal(run(model), run(reference))


@pytest.mark.whole
def test_an_output_that_is_a_view_of_a_weight_is_the_users_own(saved, device, opened):
    class Shows(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (nn.Linear(512, 256) for _ in range(2))

        def forward(self, x):
            return self.first(x), Weight.forward(self.second, x)

    class Weight(nn.Linear):
        def forward(self, x):
            return self.weight[:2]

    torch.manual_seed(0)
    reference = Shows()
    reference.second.__class__ = Weight
    path = saved(reference)
    with torch.device("meta"):
        model = Shows()
    model.second.__class__ = Weight
    opened.append(swapper.load(model, path, host_memory=HOST, device=device, device_memory=2 * MIB))
    x = torch.randn(3, 512)
    shown = [run(model, x)[1] for _ in range(3)]
    assert all(torch.equal(weight, reference.second.weight[:2]) for weight in shown)


@pytest.mark.parametrize("option", [{"dtype": torch.bfloat16}, {"strict": False}])
def test_what_is_converted_or_missing(saved, device, opened, option):
    reference = make().to(option.get("dtype", torch.float32))
    path = saved(make())
    model = on_meta() if "dtype" in option else make()
    opened.append(swapper.load(model, path, host_memory=HOST, device=device, device_memory=6 * MIB, **option))
    for _ in range(2):
        assert torch.equal(run(model), run(reference))

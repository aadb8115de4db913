"""A model whose kernels run on a device: the same outputs, within two budgets, and nothing is used before its event."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import swapper
from infer.host_device import ORDERS, HostDevice, Registering
from infer.small import CONFIG, TOKENS, make, on_meta, total_bytes
from swapper.device.storage import DeviceStorage
from swapper.device.tier import DeviceTier
from swapper.device.uploads import Uploads

pytestmark = pytest.mark.large_table

MIB = 1 << 20
HOST = 3 * MIB
LEAST = 1 * MIB
"""A layer's largest matrix has 1 MiB in fp32; all of the model about 20."""


@pytest.fixture
def saved(tmp_path):
    def save(model, metadata=None):
        save_file(model.state_dict(), tmp_path / "model.safetensors", metadata=metadata)
        return tmp_path / "model.safetensors"

    return save


@pytest.fixture(params=ORDERS[1:3])
def device(request):
    return HostDevice(request.param)


@pytest.fixture
def opened():
    models = []
    yield models
    for model in models:
        if "_swapper_loaded" in model.__dict__:
            swapper.loaded(model).unload()


def load(path, device, opened, host=HOST, budget=4 * MIB, dtype=torch.float32, **options):
    model = swapper.load(on_meta(dtype=dtype), path, host_memory=host, device=device, device_memory=budget, **options)
    opened.append(model)
    return model


def run(model, tokens=TOKENS):
    with torch.no_grad():
        return model(tokens)


def check(model):
    """Frames are conserved; none is leased for a copy that is over."""
    loaded = swapper.loaded(model)
    if loaded._hooks is not None and loaded._on_device is not None:
        loaded._on_device.tier.finish()
        loaded._streaming.pager.check()
        kept = {page for group in loaded._groups for access in group.kept_accesses for page in access.pages}
        leased = {p.index for s in loaded._streaming.sections for section in s for p in section.pages if p.leases}
        assert leased == kept


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


def test_a_device_that_runs_out_of_memory_has_what_stays_given_up(saved, device, opened):
    """Something else on the device has taken what the budget counted on."""
    reference = make()
    model = load(saved(reference), device, opened, budget=12 * MIB)
    run(model)
    run(model)
    assert device.used_bytes > 6 * MIB
    device.module.capacity_bytes = 4 * MIB
    assert torch.equal(run(model), run(reference))
    assert torch.equal(run(model), run(reference))
    assert device.used_bytes <= 4 * MIB
    check(model)


def test_out_of_memory_in_the_middle_of_a_pass_is_tried_once_more(saved, device, opened, monkeypatch):
    monkeypatch.setattr(DeviceTier, "keep_some_free", lambda self: None)
    reference = make()
    model = load(saved(reference), device, opened, budget=12 * MIB)
    run(model)
    run(model)
    device.module.capacity_bytes = 4 * MIB
    assert torch.equal(run(model), run(reference))
    assert 1 <= device.module.times_emptied <= 3
    device.module.capacity_bytes = MIB // 2  # nothing helps
    with pytest.raises(
        swapper.BudgetError, match=r"has no .* left for .*after everything that is not in use was given up"
    ):
        run(model)
    device.module.capacity_bytes = 1 << 30
    assert torch.equal(run(model), run(reference))
    check(model)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_in_a_forward_leaves_nothing_behind(saved, device, opened, error):
    def stop(*_):
        raise error

    reference = make()
    model = load(saved(reference), device, opened)
    for module in (model.layers[3], list(model.layers[0].modules())[-1], model.head):
        handle = module.register_forward_pre_hook(stop)
        for _ in range(2):
            with pytest.raises(error):
                run(model)
        handle.remove()
        assert torch.equal(run(model), run(reference))
    check(model)


def test_a_pass_that_is_abandoned_leaves_nothing_behind(saved, device, opened):
    def stop(*_):
        raise KeyboardInterrupt

    reference = make()
    model = load(saved(reference), device, opened)
    handle = model.layers[3].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        run(model)
    handle.remove()
    swapper.loaded(model)._hooks.abandon_pass()
    check(model)
    assert torch.equal(run(model), run(reference))


def test_a_file_that_ends_in_the_middle_of_a_pass(saved, device, opened):
    path = saved(make())
    model = load(path, device, opened)
    model.layers[0].register_forward_pre_hook(lambda *_: os.truncate(path, 8 * MIB))
    with pytest.raises(swapper.IoError, match="end of"):
        run(model)
    check(model)
    with pytest.raises(swapper.CheckpointError, match="changed"):
        run(model)


@pytest.mark.parametrize("budget", [4 * MIB, 12 * MIB])
def test_a_device_that_is_lost_is_named_and_nothing_hangs(saved, device, opened, budget):
    """As after a failed assertion in a kernel: every call of CUDA's fails from then on."""
    path = saved(make())
    model = load(path, device, opened, budget=budget)
    loaded = swapper.loaded(model)
    run(model)
    model.layers[2].register_forward_pre_hook(lambda *_: setattr(device.module, "is_lost", True))
    for _ in range(2):
        with pytest.raises(swapper.DeviceError, match=r"cpu failed at .*as asked for.*new process"):
            run(model)
    loaded._on_device.tier.finish()
    loaded._streaming.pager.check()
    loaded.unload()
    assert all(p.is_meta for p in model.parameters())
    again = swapper.load(on_meta(), path, host_memory=HOST)
    assert torch.equal(run(again), run(make()))
    swapper.loaded(again).unload()


def test_unloading_gives_everything_back(saved, device, opened):
    reference = make()
    model = load(saved(reference), device, opened, budget=12 * MIB)
    run(model)
    storages = [weakref.ref(image.storage) for image in swapper.loaded(model)._on_device.tier._images]
    gc.collect()
    gc.disable()
    try:
        swapper.loaded(model).unload()
        assert all(storage() is None or not storage().is_allocated for storage in storages)
    finally:
        gc.enable()
    assert all(p.is_meta for p in model.parameters())
    again = swapper.load(model, saved(reference), host_memory=HOST, device=device, device_memory=4 * MIB)
    opened.append(again)
    assert torch.equal(run(again), run(reference))


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


def test_a_model_that_is_forgotten_goes_with_what_it_had(saved):
    device = Registering()
    model = load(saved(make()), device, [])
    run(model)
    swapper.loaded(model)._streaming._registration.wait()
    assert device.registered
    ghost = weakref.ref(model)
    del model
    gc.collect()
    assert ghost() is None
    assert device.registered == {}


def test_a_user_who_changes_streams(saved, device, opened):
    from infer.host_device import Stream

    reference = make()
    model = load(saved(reference), device, opened)
    for _ in range(4):
        with device.on(Stream(is_compute=True)):
            assert torch.equal(run(model), run(reference))
        assert torch.equal(run(model), run(reference))


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


# --- the double notices what it is for ------------------------------------------------------------------------------------


def late_model(saved, opened, budget=4 * MIB):
    device = HostDevice("late")
    return load(saved(make()), device, opened, budget=budget), device


def test_a_frame_that_is_given_back_too_early_is_noticed(saved, opened, monkeypatch):
    def give_back(self):
        while self._in_flight:
            self._pager.release(self._in_flight.popleft()[1])

    monkeypatch.setattr(Uploads, "give_back", give_back)
    model, _ = late_model(saved, [])  # its unloading notices it too
    with pytest.raises(AssertionError, match="a frame was used again before its copy was over"):
        for _ in range(3):
            run(model)


def test_a_kernel_that_does_not_wait_for_its_weights_is_noticed(saved, opened, monkeypatch):
    monkeypatch.setattr(DeviceStorage, "let_compute_use", lambda self: None)
    model, _ = late_model(saved, opened)
    assert not torch.equal(run(model), run(make()))


def test_memory_that_is_filled_while_it_may_be_in_use_is_noticed(saved, opened, monkeypatch):
    fill = DeviceStorage.fill

    def without_waiting(self, pieces, stream):
        before, self._device.let_wait = self._device.let_wait, lambda *_: None
        try:
            return fill(self, pieces, stream)
        finally:
            self._device.let_wait = before

    monkeypatch.setattr(DeviceStorage, "fill", without_waiting)
    model, _ = late_model(saved, opened)
    with pytest.raises(AssertionError, match="earlier kernels may still use"):
        run(model)


def test_memory_that_is_given_back_while_it_is_filled_is_noticed():
    device = HostDevice("late")
    storage = DeviceStorage(device, 512)
    storage.free()
    storage.allocate()
    storage.fill([(0, torch.ones(512, dtype=torch.uint8))], device.new_stream())
    storage._filler = None
    with pytest.raises(AssertionError, match="given back while a copy into it may still run"):
        storage.free()


def test_few_frames_are_enough(saved, opened):
    """Copies that never end by themselves have to be waited for: nothing stands still."""
    model, _ = late_model(saved, opened)
    swapper.loaded(model)._on_device._uploads.most_in_flight = 1
    for _ in range(3):
        assert torch.equal(run(model), run(make()))
    check(model)


# --- bad input --------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_named(saved):
    with pytest.raises(swapper.DeviceError, match=r"device='cuda'.*device='cpu'"):
        swapper.load(on_meta(), saved(make()), device="cuda")


@pytest.mark.parametrize("device", ["banana", "meta", 1.5])
def test_what_is_no_device_is_refused(saved, device):
    with pytest.raises(swapper.ConfigError, match="device="):
        swapper.load(on_meta(), saved(make()), device=device)


def test_device_memory_without_a_device_is_refused(saved):
    with pytest.raises(swapper.ConfigError, match="device_memory"):
        swapper.load(on_meta(), saved(make()), device_memory="1GiB")


def test_models_that_share_memory_run_on_the_cpu(saved, device):
    path = saved(make())
    with pytest.raises(swapper.UnsupportedError, match="share memory run on the CPU"):
        with swapper.shared_memory("8MiB"):
            swapper.load(on_meta(), path, device=device)


def test_an_input_on_another_device_is_named(saved, device, opened):
    model = load(saved(make()), device, opened)
    with pytest.raises(swapper.DeviceError, match="an input is on meta"):
        run(model, torch.empty(1, 4, dtype=torch.long, device="meta"))


def test_moving_is_refused(saved, device, opened):
    model = load(saved(make()), device, opened)
    with pytest.raises(swapper.StateError, match="cannot be moved"):
        model.half()
    assert CONFIG.layers == 6

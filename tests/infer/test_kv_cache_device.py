"""Keys and values on a device whose copies come late: bit-equal to DynamicCache, whatever stays there, in one budget."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import swapper
from infer.host_device import ORDERS, HostDevice
from infer.kv_models import CONFIGS, WAYS, check_dropping, check_same, generate, make, next_turn, prompt
from swapper import KVCache
from swapper.infer.kv import kv_device
from swapper.infer.kv.kv_rows import PADDING_BYTES
from swapper.integrations.transformers import from_pretrained

LAYERS_THERE = {"one": 1.3, "some": 5, "all": 16}
"""Budgets of the device, in layers of keys and values."""


MATRIX = [
    (name, way, there, ORDERS[number % len(ORDERS)], 0 if number % 8 < 4 else 1 << 20)
    for number, (name, way, there) in enumerate(product(CONFIGS, WAYS, LAYERS_THERE))
]


def budget(plain: DynamicCache, layers: float, tokens: int = 150) -> int:
    """Bytes of this many layers, each of `tokens` tokens."""
    return int(layers * tokens * max((one.keys.nbytes + one.values.nbytes) / one.keys.shape[2] for one in plain.layers))


def stays(cache: KVCache) -> list[bool]:
    return [layer.rows.image.stays for layer in cache._pages.layers]


@pytest.fixture
def options(tmp_path):
    return {"host_memory": "2MiB", "directory": tmp_path, "device": HostDevice("late"), "device_memory": "2MiB"}


@pytest.mark.parametrize(("name", "way", "there", "order", "packed"), MATRIX)
def test_what_is_generated_is_what_a_cache_in_memory_gives(name, way, there, order, packed, options, monkeypatch):
    monkeypatch.setattr(kv_device, "PACKED_BYTES", packed)
    model = make(name, torch.bfloat16 if order == "by chance 2" else torch.float32)
    inputs = prompt(1 if way == "assisted" else 2, 130)
    expected = generate(model, inputs, DynamicCache(config=model.config), **WAYS[way])
    device, nbytes = HostDevice(order), budget(expected.past_key_values, LAYERS_THERE[there])
    options |= {"device": device, "device_memory": nbytes}
    with KVCache(model, **options) as cache:
        check_same(generate(model, inputs, cache, **WAYS[way]), expected)
        assert cache.get_seq_length() == expected.past_key_values.get_seq_length()
        cache._pages.owner.pager.check()
        assert device.peak_bytes <= nbytes
        assert cache.counters.device_peak_bytes <= nbytes
        count, layers = sum(stays(cache)), len(cache.layers)
        assert {"one": count == 0, "some": 0 < count < layers, "all": count == layers}[there]
        if there == "all":
            assert cache.counters.uploaded_bytes == cache.counters.downloaded_bytes == 0
        for mine, theirs in zip(cache.layers, expected.past_key_values.layers, strict=True):
            assert torch.equal(mine.keys.clone(), theirs.keys)
            assert torch.equal(mine.values.clone(), theirs.values)
    assert device.used_bytes == 0


@pytest.mark.parametrize("there", LAYERS_THERE)
@pytest.mark.parametrize("name", ["full", "sliding", "both"])
def test_more_tokens_than_were_announced_are_moved(name, there, options):
    model, inputs = make(name), prompt(length=30)
    expected = generate(model, inputs, DynamicCache(config=model.config), new_tokens=150)
    options["device_memory"] = budget(expected.past_key_values, LAYERS_THERE[there], 180)
    with KVCache(model, max_tokens=40, **options) as cache:
        check_same(generate(model, inputs, cache, new_tokens=150), expected)


@pytest.mark.parametrize("there", LAYERS_THERE)
def test_a_conversation_goes_on_and_is_taken_back(there, options):
    model, inputs = make("full"), prompt(batch=1)
    plain = DynamicCache(config=model.config)
    options["device_memory"] = int(LAYERS_THERE[there] * 200 * 2 * 256 * 4)
    with KVCache(model, **options) as cache:
        for _ in range(3):
            first, expected = (generate(model, inputs, one) for one in (cache, plain))
            check_same(first, expected)
            inputs = next_turn(expected.sequences, cache, plain)
        cache.reset()
        assert cache.get_seq_length() == 0
        check_same(generate(model, prompt(1), cache), generate(model, prompt(1), None))


@pytest.mark.parametrize("there", LAYERS_THERE)
def test_entries_of_a_batch_are_picked(there, options):
    model = make("both")
    options["device_memory"] = int(LAYERS_THERE[there] * 120 * 2 * 3 * 256 * 4)
    plain = DynamicCache(config=model.config)
    with KVCache(model, **options) as cache, torch.no_grad():
        for one in (cache, plain):
            model(prompt()["input_ids"], cache=one)
            one.reorder_cache(torch.tensor([1, 0]))
            one.batch_repeat_interleave(2)
            one.batch_select_indices(torch.tensor([0, 3, 2]))
        ids = torch.tensor([[5], [6], [7]])
        for _ in range(3):
            assert torch.equal(model(ids, cache=cache).logits, model(ids, cache=plain).logits)


def test_weights_and_keys_are_on_the_device_and_in_host_memory_and_on_the_drive(tmp_path, options):
    model, inputs = make("full").requires_grad_(False), prompt()
    model.save_pretrained(tmp_path / "model")
    expected = generate(model, inputs, None)
    where = {"device": options["device"], "device_memory": "6MiB"}
    loaded = from_pretrained(AutoModelForCausalLM, tmp_path / "model", host_memory="8MiB", **where)
    with swapper.loaded(loaded), KVCache(loaded, **options) as cache:
        check_same(generate(loaded, inputs, cache), expected)
        assert cache.counters.read_bytes["kv"] > 0


def test_a_model_under_inference_mode(options):
    model = make("full")
    expected = generate(model, prompt(), None)
    with KVCache(model, **options) as cache, torch.inference_mode():
        check_same(generate(model, prompt(), cache), expected)


# --- when things are copied -------------------------------------------------------------------------------------------


def test_the_next_layer_is_copied_while_one_computes_and_nobody_waits_for_the_device(options, monkeypatch):
    model, inputs = make("full"), prompt()
    device, waits, ahead = options["device"], [], []
    options |= {"host_memory": "16MiB", "device_memory": "4MiB"}
    with KVCache(model, **options) as cache, torch.no_grad():
        ids = model(**inputs, cache=cache).logits[:, -1:].argmax(-1)
        ids = model(ids, cache=cache).logits[:, -1:].argmax(-1)
        layers = cache._pages.layers

        def look(layer: int) -> None:
            images = [one.rows.image for one in layers[layer + 1 :] if not one.rows.image.stays]
            ahead.extend(image.is_filled for image in images[:1])

        for number, block in enumerate(model.model.layers):
            block.mlp.register_forward_pre_hook(lambda *_, number=number: look(number))
        monkeypatch.setattr(device, "wait_for", waits.append)
        assert 0 < sum(stays(cache)) < len(layers) - 1
        model(ids, cache=cache)
        assert ahead
        assert all(ahead)
        assert waits == []
        monkeypatch.undo()


def test_new_rows_of_layers_that_stay_are_not_copied(options):
    model = make("full")
    options["device_memory"] = "64MiB"
    with KVCache(model, **options) as cache:
        generate(model, prompt(), cache)
        counters = cache.counters
        assert counters.uploaded_bytes == counters.downloaded_bytes == counters.written_bytes["kv"] == 0


def test_a_few_new_rows_are_all_that_is_copied_to_host_memory(options):
    model = make("full")
    options["device_memory"] = "1MiB"
    with KVCache(model, **options) as cache:
        generate(model, prompt(), cache, new_tokens=2)
        before = cache.counters.downloaded_bytes
        generate(model, prompt(length=120), cache, new_tokens=11)
        assert cache.counters.downloaded_bytes - before == 8 * (120 + 10 - 101) * (2 * 2 * 256 * 4 + PADDING_BYTES)


# --- saved contexts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", LAYERS_THERE)
@pytest.mark.parametrize("name", ["full", "sliding", "both", "latent"])
def test_a_context_is_saved_from_a_device_and_goes_on_there(name, there, options, tmp_path):
    model, inputs = make(name), prompt()
    inputs["attention_mask"][:] = 1
    plain = DynamicCache(config=model.config)
    on_cpu = {"host_memory": "4MiB", "directory": tmp_path}
    with torch.no_grad():
        model(inputs["input_ids"][:, :99], cache=plain)
        options["device_memory"] = budget(plain, LAYERS_THERE[there])
        for path, where in (("device.pt", options), ("cpu.pt", on_cpu)):
            with KVCache(model, **where) as cache:
                model(inputs["input_ids"][:, :99], cache=cache)
                cache.save(tmp_path / path, tokens=inputs["input_ids"])
    assert (tmp_path / "device.pt").read_bytes() == (tmp_path / "cpu.pt").read_bytes()
    expected = generate(model, inputs, plain)
    with KVCache.open(tmp_path / "cpu.pt", model, tokens=inputs["input_ids"], **options) as cache:
        check_same(generate(model, inputs, cache), expected)
        cache.save(tmp_path / "device.pt", tokens=expected.sequences)
    with KVCache.open(tmp_path / "device.pt", model, **options) as cache:
        again = generate(model, {"input_ids": expected.sequences}, expected.past_key_values, new_tokens=5)
        check_same(generate(model, {"input_ids": expected.sequences}, cache, new_tokens=5), again)


@pytest.mark.parametrize("layer", [0, 7])
@pytest.mark.parametrize("there", LAYERS_THERE)
def test_a_changed_byte_is_found(layer, there, options, tmp_path):
    model, path = make("full"), tmp_path / "context.pt"
    with KVCache(model, **options) as cache, torch.no_grad():
        model(prompt()["input_ids"], cache=cache)
        cache.save(path)
    keys = torch.load(path)["layers"][str(layer)]["keys"]
    raw = path.read_bytes()
    at = raw.index(keys[1, 3, 60].numpy().tobytes())
    path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
    options["device_memory"] = int(LAYERS_THERE[there] * 240 * 2 * 2 * 256 * 4)
    cache = KVCache.open(path, model, **options)
    with cache, pytest.raises(swapper.ChecksumError, match=f"layer {layer}"):
        generate(model, prompt(), cache)


# --- what does not fit, and what fails --------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["host_memory", "device_memory"])
def test_a_budget_that_is_too_small_says_what_is_enough(option, options):
    model, inputs = make("full"), prompt()
    expected = generate(model, inputs, None, new_tokens=1)
    options[option] = "256KiB"
    with KVCache(model, **options) as cache, pytest.raises(swapper.BudgetError, match=f"{option}=.* KVCache") as caught:
        generate(model, inputs, cache)
    options[option] = caught.value.smallest_bytes
    with KVCache(model, **options) as cache:
        check_same(generate(model, inputs, cache, new_tokens=1), expected)


def test_a_budget_that_ends_in_a_generation_keeps_what_is_there(options):
    model, inputs = make("full"), prompt(length=200)
    options["device_memory"] = "1MiB"
    with KVCache(model, **options) as cache:
        with pytest.raises(swapper.BudgetError, match="device_memory"):
            generate(model, inputs, cache, new_tokens=250)
        count = cache.get_seq_length()
        assert 200 < count < 449
        assert {layer.get_seq_length() for layer in cache.layers} == {count}
        plain = generate(model, inputs, None, new_tokens=count - 199).past_key_values
        for mine, theirs in zip(cache.layers, plain.layers, strict=True):
            assert torch.equal(mine.keys.clone(), theirs.keys)


@pytest.mark.parametrize("order", ORDERS)
def test_layers_leave_a_device_that_is_short_of_memory(order, options):
    model, inputs = make("full"), prompt()
    expected = generate(model, inputs, None, new_tokens=60)
    device = HostDevice(order)
    options |= {"device": device, "device_memory": "16MiB"}
    with KVCache(model, **options) as cache:
        device.module.capacity_bytes = 3 << 20  # others have taken the rest since
        check_same(generate(model, inputs, cache, new_tokens=60), expected)
        assert 0 < sum(stays(cache)) < 8


def test_a_device_that_is_lost_is_an_error_and_the_cache_closes(options):
    model = make("full")
    options["device_memory"] = "3MiB"
    cache = KVCache(model, **options)
    generate(model, prompt(), cache)
    options["device"].module.is_lost = True
    with pytest.raises(swapper.DeviceError):
        generate(model, prompt(length=140), cache)
    cache.close()


def test_keys_on_another_device_are_refused(options):
    model = make("full")
    with KVCache(model, **options) as cache, pytest.raises(swapper.UnsupportedError, match="these keys are on meta"):
        cache.update(*(torch.empty(1, 4, 2, 64, device="meta") for _ in range(2)), 0)
    with pytest.raises(swapper.ConfigError, match="goes with a device"):
        KVCache(model, device_memory="1GiB", directory=options["directory"])


def test_a_dropped_cache_gives_everything_back(options):
    check_dropping(make("full"), options, lambda: options["device"].used_bytes > 0)
    assert options["device"].used_bytes == 0

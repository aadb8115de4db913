"""Attention by blocks on a device whose copies come late: that of a CPU, bit for bit, where one layer does not fit there."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from transformers import DynamicCache

import swapper
from infer.host_device import ORDERS, HostDevice
from infer.kv_models import WAYS, check_same, generate, next_turn, prompt
from infer.test_kv_blocks import BATCH, CONFIGS, check_close, check_saved, make
from swapper import KVCache
from swapper.infer.kv import kv_attention, kv_blocks, kv_device_blocks

BLOCK_TOKENS = 50
MATRIX = [(*pair, ORDERS[number % len(ORDERS)]) for number, pair in enumerate(product(CONFIGS, WAYS))]


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    for module in (kv_attention, kv_blocks, kv_device_blocks):
        monkeypatch.setattr(module, "MAX_BLOCK_TOKENS", BLOCK_TOKENS)


@pytest.fixture
def by_blocks(tmp_path):
    return {"host_memory": "2MiB", "directory": tmp_path, "attention": "blocks"}


@pytest.fixture
def options(by_blocks):
    return {**by_blocks, "device": HostDevice("late"), "device_memory": "1MiB"}


@pytest.mark.parametrize(("name", "way", "order"), MATRIX)
def test_what_is_generated_is_what_blocks_on_a_cpu_give(name, way, order, by_blocks):
    model, inputs = make(name), prompt(1 if way == "assisted" else BATCH.get(name, 4), 300)
    expected = generate(model, inputs, DynamicCache(config=model.config), 8, **WAYS[way])
    layers = expected.past_key_values.layers
    row_bytes = max((one.keys.nbytes + one.values.nbytes) // one.keys.shape[2] for one in layers) + 32
    device, device_bytes = HostDevice(order), int(2.5 * BLOCK_TOKENS * row_bytes)
    with KVCache(model, **{**by_blocks, "host_memory": "64MiB"}) as cache:
        on_cpu = generate(model, inputs, cache, 8, **WAYS[way])
    with KVCache(model, device=device, device_memory=device_bytes, **by_blocks) as cache:
        found = generate(model, inputs, cache, 8, **WAYS[way])
        check_close(found, expected)
        check_same(found, on_cpu)
        cache._pages.owner.pager.check()
        assert cache.counters.device_peak_bytes <= device_bytes < max(one.keys.nbytes for one in layers)
        assert device.peak_bytes <= device_bytes
        assert cache.counters.uploaded_bytes > 0
        for mine, theirs in zip(cache.layers if way == "greedy" else (), layers, strict=way == "greedy"):
            assert mine.get_seq_length() == theirs.get_seq_length()
    assert device.used_bytes == 0


def test_a_conversation_goes_on_and_is_taken_back(options):
    model, inputs = make("llama"), prompt(1, 200)
    plain = DynamicCache(config=model.config)
    with KVCache(model, **{**options, "device_memory": "256KiB"}) as cache:
        for _ in range(3):
            found = generate(model, inputs, cache)
            model.set_attn_implementation("sdpa")
            expected = generate(model, inputs, plain)
            model.set_attn_implementation("swapper_blocks")
            check_close(found, expected)
            inputs = next_turn(expected.sequences, cache, plain)
        cache.reset()
        assert cache.get_seq_length() == 0


def test_the_next_block_is_copied_while_one_is_attended_over_and_nobody_waits_for_the_device(options, monkeypatch):
    model, inputs = make("llama"), prompt(4, 300)
    device, waits, ahead = options["device"], [], []
    options |= {"host_memory": "32MiB", "device_memory": int(2.5 * BLOCK_TOKENS * (4 * 2 * 256 * 4 + 32))}
    with KVCache(model, **options) as cache, torch.no_grad():
        model(**inputs, cache=cache)
        step = inputs["input_ids"][:, :1]
        model(step, cache=cache)
        home = cache._pages.owner._home
        blocks = home.blocks

        def look(rows, begin, end):
            for found in blocks(rows, begin, end):
                order = home._order
                now = next(number for number, image in enumerate(order) if image.leases)
                ahead.append(order[(now + 1) % len(order)].is_filled)
                yield found

        monkeypatch.setattr(home, "blocks", look)
        monkeypatch.setattr(device, "wait_for", waits.append)
        model(step, cache=cache)
        assert ahead == [True] * (3 * 7)
        assert waits == []
        monkeypatch.undo()


@pytest.mark.parametrize("order", ORDERS)
def test_a_saved_context_goes_on_by_blocks_and_a_changed_byte_is_found(order, options, tmp_path):
    check_saved({**options, "device": HostDevice(order)}, tmp_path / "context.pt")


def test_a_budget_below_two_blocks_says_what_is_enough(options):
    model, inputs = make("llama"), prompt(2, 30)
    expected = generate(model, inputs, None, 3)
    options["device_memory"] = "7KiB"
    with (
        KVCache(model, **options) as cache,
        pytest.raises(swapper.BudgetError, match=r"device_memory=7\.0 KiB .* 2 blocks of one token") as caught,
    ):
        generate(model, inputs, cache)
    assert caught.value.option == "device_memory"
    options["device_memory"] = caught.value.smallest_bytes
    with KVCache(model, **options) as cache:
        check_close(generate(model, inputs, cache, 3), expected)


def test_a_device_that_is_lost_is_an_error_and_the_cache_closes(options):
    model = make("llama")
    cache = KVCache(model, **options)
    generate(model, prompt(), cache)
    options["device"].module.is_lost = True
    with pytest.raises(swapper.DeviceError):
        generate(model, prompt(length=140), cache)
    cache.close()
    assert model.config._attn_implementation == "sdpa"

"""A cache of keys and values in pages gives what transformers' DynamicCache gives, bit for bit, whatever the budget."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path

import peft
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
    LlamaConfig,
    T5Config,
)

import swapper
from infer.kv_models import CONFIGS, DECODER, WAYS, check_dropping, check_same, generate, make, next_turn, prompt
from swapper import KVCache
from swapper.infer.kv.kv_home import HostRows
from swapper.integrations.transformers import from_pretrained
from swapper.integrations.transformers_layers import PagedLayer
from swapper.paging.residency import COLD


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_generated_is_what_a_cache_in_memory_gives(name, dtype, way, small):
    model = make(name, dtype)
    inputs = prompt(1 if way == "assisted" else 2, 130)
    expected = generate(model, inputs, DynamicCache(config=model.config), **WAYS[way])
    if way in ("beams", "sampled"):  # several entries for each
        small["host_memory"] = "4MiB"
    with KVCache(model, **small) as cache:
        check_same(generate(model, inputs, cache, **WAYS[way]), expected)
        assert cache.get_seq_length() == expected.past_key_values.get_seq_length()
        cache._pages.owner.pager.check()
        if dtype is torch.float32 and name not in ("sliding", "latent") and way != "assisted":
            assert cache.counters.read_bytes["kv"] > 0


def test_encoder_and_decoder(small):
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=300,
        d_model=256,
        d_ff=256,
        d_kv=64,
        num_layers=8,
        num_decoder_layers=8,
        num_heads=4,
        pad_token_id=0,
        decoder_start_token_id=0,
        eos_token_id=None,
    )
    model, inputs = AutoModelForSeq2SeqLM.from_config(config).eval(), prompt()
    plain = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    expected = generate(model, inputs, plain, new_tokens=60)
    with KVCache(model, **small) as own, KVCache(model, **small) as cross:
        check_same(generate(model, inputs, EncoderDecoderCache(own, cross), new_tokens=60), expected)
        assert cross.counters.read_bytes["kv"] > 0


def test_weights_and_keys_are_on_the_drive(tmp_path, small):
    model, inputs = make("full").requires_grad_(False), prompt()
    model.save_pretrained(tmp_path / "model")
    expected = generate(model, inputs, None)
    loaded = from_pretrained(AutoModelForCausalLM, tmp_path / "model", host_memory="8MiB")
    with swapper.loaded(loaded), KVCache(loaded, **small) as cache:
        check_same(generate(loaded, inputs, cache), expected)
        assert cache.counters.read_bytes["kv"] > 0


@pytest.mark.parametrize("name", ["full", "sliding", "both"])
def test_more_tokens_than_were_announced_are_moved(name, small):
    model, inputs = make(name), prompt(length=30)
    expected = generate(model, inputs, None, new_tokens=150)
    with KVCache(model, max_tokens=40, **small) as cache:
        check_same(generate(model, inputs, cache, new_tokens=150), expected)


def test_a_conversation_goes_on_and_is_taken_back(small):
    model, inputs = make("full"), prompt(batch=1)
    plain = DynamicCache(config=model.config)
    with KVCache(model, **small) as cache:
        for _ in range(3):
            first, expected = (generate(model, inputs, one) for one in (cache, plain))
            check_same(first, expected)
            inputs = next_turn(expected.sequences, cache, plain)
        cache.reset()
        assert cache.get_seq_length() == 0
        check_same(generate(model, prompt(), cache), generate(model, prompt(), None))


def test_keys_and_values_are_those_of_a_cache_in_memory(small):
    model, inputs = make("both"), prompt()
    plain = DynamicCache(config=model.config)
    generate(model, inputs, plain)
    with KVCache(model, **small) as cache:
        generate(model, inputs, cache)
        for mine, theirs in zip(cache.layers, plain.layers, strict=True):
            keys, values = mine.keys.clone(), mine.values.clone()
            assert torch.equal(keys, theirs.keys)
            assert torch.equal(values, theirs.values)


def test_keys_that_are_read_after_a_reorder_stay(small):
    model, ids = make("sliding"), prompt()["input_ids"]
    plain = DynamicCache(config=model.config)
    with KVCache(model, **small) as cache, torch.no_grad():
        for one in (cache, plain):
            for tokens in (ids, *ids.split(10, 1)[:3]):
                model(tokens, cache=one)
            one.reorder_cache(torch.tensor([1, 0]))
        for mine, theirs in zip(cache.layers, plain.layers, strict=True):
            assert torch.equal(mine.keys.clone(), theirs.keys)
        assert torch.equal(model(ids[:, :1], cache=cache).logits, model(ids[:, :1], cache=plain).logits)


def test_a_layers_turn_ends_when_nobody_has_its_keys(small, monkeypatch):
    model, ids = make("full"), prompt()["input_ids"]
    plain, is_over, kept = DynamicCache(config=model.config), [], []
    update = PagedLayer.update

    def keep(layer, *arguments, **options):
        keys, values = update(layer, *arguments, **options)
        if layer.index == 2:
            kept.append(values[:, 1:, 5:].transpose(1, 2))
        return keys, values

    with KVCache(model, **small) as cache, torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.register_forward_pre_hook(lambda *_: is_over.append(cache._pages.owner._home.leased is None))
        model(ids, cache=cache)
        assert all(is_over)
        is_over.clear()
        monkeypatch.setattr(PagedLayer, "update", keep)
        logits = model(ids[:, :1], cache=cache).logits
        assert is_over == [True, True, False, True, True, True, True, True]
        for tokens in (ids, ids[:, :1]):
            expected = model(tokens, cache=plain).logits
        assert torch.equal(logits, expected)
        assert torch.equal(kept[0], plain.layers[2].values[:, 1:, 5:].transpose(1, 2))


def test_what_a_window_has_left_behind_is_forgotten_unless_somebody_has_views(small):
    model, ids = make("sliding"), prompt(length=140)["input_ids"]
    with KVCache(model, **small) as cache, torch.no_grad():
        for index, tokens in enumerate((ids[:, :100], *ids[:, 100:].split(8, 1))):
            model(tokens, cache=cache)
            if index == 1:
                kept = cache.layers[3].keys[:, 1:]
        pages = cache._pages.owner
        left = {}
        for rows in pages._layers.values():
            behind = rows.section.pages_of(0, rows.over * rows.shape.nbytes)[:-1]
            left[rows.index] = [page.residency is COLD and pages.pager.file_of(page) is None for page in behind]
        assert all(left.values())
        assert [index for index, forgotten in left.items() if not all(forgotten)] == [3]
        del kept


def test_a_ctrl_c_while_a_turn_ends_is_raised_in_the_next_one(small, monkeypatch):
    model, ids = make("full"), prompt()["input_ids"]
    plain, release, interrupted = DynamicCache(config=model.config), HostRows.release, []

    def interrupt(home):
        rows = release(home)
        if rows is not None and rows.index == 2 and not interrupted:
            interrupted.append(rows)
            raise KeyboardInterrupt
        return rows

    with KVCache(model, **small) as cache, torch.no_grad():
        model(ids, cache=cache)
        monkeypatch.setattr(HostRows, "release", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, :1], cache=cache)
        assert interrupted and cache.get_seq_length() == ids.shape[1]
        logits = model(ids[:, :1], cache=cache).logits
        for tokens in (ids, ids[:, :1]):
            expected = model(tokens, cache=plain).logits
        assert torch.equal(logits, expected)


def test_the_last_page_is_not_written_at_each_token(small):
    model = make("full")
    with KVCache(model, **small) as cache:
        generate(model, prompt(length=140), cache, new_tokens=2)
        before = cache.counters.written_bytes["kv"]
        generate(model, prompt(length=160), cache, new_tokens=40)
        added = 8 * 40 * 2 * 2 * 256 * 4
        assert cache.counters.written_bytes["kv"] - before < 2 * (added + 8 * cache.counters.frame_bytes)


def test_by_default_no_more_memory_is_taken_than_the_longest_text_needs(tmp_path):
    model = make("full")
    with KVCache(model, directory=tmp_path, max_tokens=160) as cache:
        check_same(generate(model, prompt(), cache), generate(model, prompt(), None))
        kv_bytes = 8 * 160 * 2 * 2 * 256 * 4
        assert kv_bytes <= cache.counters.pool_bytes <= kv_bytes + 9 * (4 << 20)
        assert cache.counters.read_bytes["kv"] == cache.counters.written_bytes["kv"] == 0


def test_a_dropped_cache_gives_memory_and_file_back(small):
    check_dropping(make("full"), small)
    assert list(small["directory"].iterdir()) == []


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_budget_below_one_layer_says_what_is_enough(small):
    model, inputs = make("full"), prompt(length=400)
    expected = generate(model, inputs, None, new_tokens=3)
    with (
        KVCache(model, **small) as cache,
        pytest.raises(swapper.BudgetError, match="keys and values of one layer") as caught,
    ):
        generate(model, inputs, cache)
    with KVCache(model, **{**small, "host_memory": caught.value.smallest_bytes}) as cache:
        check_same(generate(model, inputs, cache, new_tokens=3), expected)


@pytest.mark.parametrize("attention", [None, "blocks"])
@pytest.mark.parametrize("layers", [1, 8, 40])
def test_the_budget_that_is_named_is_enough_for_all_layers(layers, attention, small):
    """Larger pools have larger pages, of which the last one of each layer stays."""
    sizes = {"hidden_size": 64, "intermediate_size": 16, "num_hidden_layers": layers, "head_dim": 512}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**DECODER, **sizes})).eval()
    ids = prompt(2, 400)["input_ids"]
    small |= {"attention": attention, "host_memory": "1MiB"}
    with (
        KVCache(model, **small) as cache,
        torch.no_grad(),
        pytest.raises(swapper.BudgetError, match=r"1\.0 MiB") as caught,
    ):
        model(ids, cache=cache)
    with KVCache(model, **{**small, "host_memory": caught.value.smallest_bytes}) as cache, torch.no_grad():
        model(ids, cache=cache)
        assert cache.get_seq_length() == ids.shape[1]


def test_a_budget_that_ends_in_a_generation_keeps_what_is_there(small):
    model, inputs = make("full"), prompt(length=200)
    with KVCache(model, **small) as cache:
        with pytest.raises(swapper.BudgetError):
            generate(model, inputs, cache, new_tokens=250)
        count = cache.get_seq_length()
        assert 200 < count < 449
        assert {layer.get_seq_length() for layer in cache.layers} == {count}
        plain = generate(model, inputs, None, new_tokens=count - 199).past_key_values
        for mine, theirs in zip(cache.layers, plain.layers, strict=True):
            assert torch.equal(mine.keys.clone(), theirs.keys)


def test_a_cache_is_for_one_batch_and_dtype(small):
    model = make("full")
    with KVCache(model, **small) as cache:
        generate(model, prompt(), cache)
        with pytest.raises(swapper.ConfigError, match=r"batch 2, but gets .*batch 3"), torch.no_grad():
            model(prompt(3)["input_ids"], cache=cache)
        with pytest.raises(swapper.ConfigError, match="bfloat16"), torch.no_grad():
            make("full", torch.bfloat16)(prompt()["input_ids"], cache=cache)


def test_what_it_cannot_do_is_refused(small, tmp_path):
    model = make("full")
    with KVCache(model, **small) as cache:
        with pytest.raises(swapper.UnsupportedError, match="no_grad"):
            model(prompt()["input_ids"], cache=cache)
        with pytest.raises(swapper.UnsupportedError, match="not copied"):
            copy.deepcopy(cache)
        with pytest.raises(swapper.UnsupportedError, match="not pickled"):
            pickle.dumps(cache)
        with pytest.raises(swapper.StateError, match="are in pages"):
            cache.layers[0].keys = torch.zeros(1)
    with pytest.raises(swapper.StateError, match="closed"):
        generate(model, prompt(), cache)
    with pytest.raises(swapper.ConfigError, match="model of transformers"):
        KVCache(torch.nn.Linear(2, 2), **small)
    with pytest.raises(swapper.ConfigError, match="max_tokens"):
        KVCache(model, max_tokens=0, **small)
    with pytest.raises(swapper.ConfigError, match="is not there"):
        KVCache(model, host_memory="2MiB", directory=tmp_path / "missing")
    with pytest.raises(swapper.ConfigError, match="is in memory"):
        KVCache(model, host_memory="2MiB", directory=Path("/dev/shm"))


@pytest.mark.parametrize(
    "said", ["generate", "PEFT", "compiled", "generation_config", "forward", "encoder and decoder"]
)
def test_a_cache_that_may_not_be_used_is_refused(said, small):
    inner, inputs = make("full"), prompt()
    model = inner
    if said == "PEFT":
        model = peft.get_peft_model(inner, peft.LoraConfig(target_modules=["q_proj"])).eval()
    if said == "compiled":
        model = torch.compile(inner, backend="eager")
    expected = generate(model, inputs, None)
    with KVCache(model, **small) as cache:
        if said == "generation_config":
            model.generation_config.use_cache = False
        with pytest.raises(swapper.ConfigError, match="use_cache=False with a KVCache"):
            if said == "forward":
                model(inputs["input_ids"], cache=cache, use_cache=False)
            elif said == "encoder and decoder":
                both = EncoderDecoderCache(cache, DynamicCache(config=model.config))
                model(inputs["input_ids"], cache=both, use_cache=False)
            else:
                generate(model, inputs, cache, **({} if said == "generation_config" else {"use_cache": False}))
        assert cache.get_seq_length() == 0
        check_same(generate(model, inputs, cache, use_cache=True), expected)
    assert not any(part._forward_pre_hooks for part in model.modules())
    with KVCache(inner, **small):
        for one in (inner, copy.deepcopy(inner), pickle.loads(pickle.dumps(inner))):
            assert torch.equal(generate(one, inputs, None, use_cache=False).sequences, expected.sequences)


def test_two_threads_in_one_cache_are_refused(small):
    model = make("full")
    reached, go_on = threading.Event(), threading.Event()
    sequences = []

    def pause(*_):
        if threading.current_thread() is not threading.main_thread() and not reached.is_set():
            reached.set()
            assert go_on.wait(60)

    expected = generate(model, prompt(), None).sequences
    model.model.layers[3].register_forward_pre_hook(pause)
    with KVCache(model, **small) as cache:
        thread = threading.Thread(target=lambda: sequences.append(generate(model, prompt(), cache).sequences))
        thread.start()
        assert reached.wait(60)
        with pytest.raises(swapper.StateError, match="two threads"):
            generate(model, prompt(), cache)
        go_on.set()
        thread.join()
    assert torch.equal(sequences[0], expected)

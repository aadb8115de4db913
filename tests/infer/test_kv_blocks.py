"""Attention by blocks gives what attention with all keys gives, but for the last bits, where one layer does not fit in memory."""

from __future__ import annotations

import errno
import threading

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    T5Config,
)

import swapper
from infer.kv_models import DECODER, WAYS, generate, prompt
from infer.kv_models import make as make_of_8_layers
from swapper import _C, KVCache
from swapper.infer.kv import kv_attention, kv_blocks
from swapper.infer.kv.kv_attention import LOWEST, attend, pieces
from swapper.integrations import transformers_attention
from swapper.integrations.transformers_attention import NAME, attention_by_blocks
from swapper.io.drives import Drives
from swapper.paging.store.scratch import ScratchFile

LAYERS = {**DECODER, "num_hidden_layers": 3}
CONFIGS = {
    "llama": LlamaConfig(**LAYERS),
    "eager": LlamaConfig(**LAYERS, attn_implementation="eager"),
    "grouped": Qwen2Config(**{**LAYERS, "num_key_value_heads": 2}),
    "sliding": MistralConfig(**LAYERS, sliding_window=290),
    "capped": Gemma2Config(**{**LAYERS, "num_key_value_heads": 2}, sliding_window=40, head_dim=64),
    "gpt2": GPT2Config(
        n_embd=256, n_layer=3, n_head=4, vocab_size=300, n_positions=512, eos_token_id=None, pad_token_id=0
    ),
}
BATCH = {"grouped": 8, "capped": 8}
"""So many that a layer of 300 tokens takes 2.4 MB; of the others 4."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def make(name, dtype=torch.float32):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name]).to(dtype).eval()


def check_close(got, expected):
    assert torch.equal(got.sequences, expected.sequences)
    for one, other in zip(got.logits, expected.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.fixture
def small(tmp_path):
    return {"host_memory": "2MiB", "directory": tmp_path, "attention": "blocks"}


@pytest.fixture
def blocks_of_50(monkeypatch):
    """Blocks of at most 50 tokens, and few queries at once."""
    monkeypatch.setattr(kv_attention, "MAX_BLOCK_TOKENS", 50)
    monkeypatch.setattr(kv_blocks, "MAX_BLOCK_TOKENS", 50)
    monkeypatch.setattr(kv_attention, "SCORES_BYTES", 4 * 4 * 4 * 50 * 60)


# --- the sums ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", "bool", "of heads", "added", "-inf"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("queries", "softcap"), [(1, None), (70, None), (70, 5.0)])
def test_sums_over_blocks_are_those_over_all_keys(kind, dtype, queries, softcap, blocks_of_50):
    torch.manual_seed(1)
    query, keys, values = (torch.randn(2, *shape).to(dtype) for shape in ((6, queries, 16), (2, 130, 16), (2, 130, 24)))
    seen = torch.rand(2, 6 if kind == "of heads" else 1, queries, 130) < 0.3
    seen[0, :, -1, :90] = False  # whole blocks
    seen[:, :, -1, 129] = True
    added = torch.randn(seen.shape) if kind in ("added", "-inf") else torch.zeros(seen.shape)
    lowest = -torch.inf if kind == "-inf" else LOWEST / 2
    if kind == "none":
        seen[:] = True
    mask = torch.where(seen, added, lowest) if kind in ("added", "-inf") else seen
    found = attend(
        query,
        (2, 24),
        pieces(keys, values),
        lambda a, b, c, d: mask[:, :, a:b, c:d] if kind != "none" else None,
        0.3,
        softcap,
    )
    scores = 0.3 * query.double() @ keys.double().repeat_interleave(3, 1).mT
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    scores = torch.where(seen, scores + added, -torch.inf)
    expected = scores.softmax(-1).nan_to_num(0) @ values.double().repeat_interleave(3, 1)
    sees = seen.any(-1, keepdim=True)
    assert found.dtype is dtype
    assert found.isfinite().all()
    difference = torch.where(sees, found.double() - expected, 0)
    assert difference.abs().max() < TOLERANCE[dtype]


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_generated_is_what_a_cache_in_memory_gives(name, way, small):
    model = make(name)
    before = model.config._attn_implementation
    inputs = prompt(1 if way == "assisted" else BATCH.get(name, 4), 300)
    expected = generate(model, inputs, DynamicCache(config=model.config), 8, **WAYS[way])
    with KVCache(model, **small) as cache:
        check_close(generate(model, inputs, cache, 8, **WAYS[way]), expected)
        assert cache.get_seq_length() == expected.past_key_values.get_seq_length()
        cache._pages.owner.pager.check()
        if way != "assisted":
            layer = max(one.keys.nbytes + one.values.nbytes for one in expected.past_key_values.layers)
            assert cache.counters.pool_bytes <= 2 << 20 < layer
            assert cache.counters.read_bytes["kv"] > 0
        assert model.config._attn_implementation == NAME
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_are_close(dtype, small):
    model, inputs = make("grouped", dtype), prompt(16, 300)
    ids, is_token = inputs["input_ids"], inputs["attention_mask"].bool()
    steps = [inputs, {"input_ids": ids[:, :2], "attention_mask": torch.cat([is_token, is_token[:, -2:]], 1)}]
    plain = DynamicCache(config=model.config)
    with torch.no_grad():
        expected = [model(**step, cache=plain).logits for step in steps]
        with KVCache(model, **small) as cache:
            found = [model(**step, cache=cache).logits for step in steps]
    for one, other, of in zip(found, expected, (is_token, slice(None)), strict=True):
        torch.testing.assert_close(one[of], other[of], rtol=0, atol=TOLERANCE[dtype])


def test_blocks_are_read_while_others_are_computed_on(small):
    model, inputs = make("llama"), prompt(4, 300)
    with KVCache(model, **small) as cache, torch.no_grad():
        model(**inputs, cache=cache)
        counters = cache.counters
        for _ in range(10):
            used, read = counters.pages_used, counters.read_bytes["kv"]
            model(inputs["input_ids"][:, :1], cache=cache)
            assert counters.read_bytes["kv"] - read < (counters.pages_used - used) * counters.frame_bytes
        assert counters.pages_used > 10 * 3 * 37
        assert counters.pages_missed < counters.pages_used // 100  # the others were asked for before their blocks were


def test_where_a_layer_fits_results_are_close_too(small, tmp_path):
    model, inputs = make("llama"), prompt(2, 60)
    with KVCache(model, **{**small, "host_memory": "16MiB"}) as cache:
        check_close(generate(model, inputs, cache), generate(model, inputs, None))
        assert cache.counters.read_bytes["kv"] == 0


def test_caches_of_several_threads_share_a_model(small):
    model = make("llama")
    expected = [generate(model, prompt(4, length), None, 4) for length in (300, 200)]
    caches = [KVCache(model, **small) for _ in expected]
    found = [None, None]

    def run(number, length):
        with caches[number] as cache:
            found[number] = generate(model, prompt(4, length), cache, 4)

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate((300, 200))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for pair in zip(found, expected, strict=True):
        check_close(*pair)
    assert model.config._attn_implementation == "sdpa"


def test_scratch_files_of_several_threads_in_a_directory_are_files_of_their_own(tmp_path):
    engine, begin, failed = _C.Engine(), threading.Barrier(4), []

    def make_some():
        begin.wait()
        try:
            for _ in range(50):
                ScratchFile(engine, Drives((tmp_path,)), ()).close()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=make_some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.close()
    assert not failed and not list(tmp_path.iterdir())


def test_masks_and_keys_of_other_callers(blocks_of_50):
    model = make("grouped")
    ids, padding = prompt(2, 120).values()
    plain = [model(ids).logits, model(ids, attention_mask=padding).logits]
    own = torch.ones(2, 1, 120, 120).tril().bool()
    own[:, :, :, 7] = False
    own |= torch.eye(120).bool()
    added = torch.where(own, 0.0, -torch.inf)
    plain += [model(ids, attention_mask=mask).logits for mask in (own, added)]
    model.set_attn_implementation(NAME)
    with torch.no_grad():
        found = [model(ids, attention_mask=mask).logits for mask in (None, padding, own, added)]
    is_token = padding.bool()
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one[is_token], other[is_token], rtol=1e-5, atol=1e-5)


# --- saved contexts, and what fails -----------------------------------------------------------------------------------


def check_saved(options, path):
    """Save a context and go on; then change a byte of the file, which is found."""
    model = make("grouped")
    inputs = {name: one.clone() for name, one in prompt(8, 300).items()}
    inputs["attention_mask"][:] = 1
    plain = DynamicCache(config=model.config)
    with KVCache(model, **options) as cache, torch.no_grad():
        for one in (cache, plain):
            model(inputs["input_ids"][:, :299], cache=one)
            if one is cache:
                cache.save(path, tokens=inputs["input_ids"])
                model.set_attn_implementation("sdpa")
    expected = generate(model, inputs, plain, 6)
    with KVCache.open(path, model, tokens=inputs["input_ids"], **options) as cache:
        check_close(generate(model, inputs, cache, 6), expected)
    keys = torch.load(path)["layers"]["2"]["keys"]
    raw = path.read_bytes()
    at = raw.index(keys[1, 1, 60].numpy().tobytes())
    path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
    with KVCache.open(path, model, **options) as cache:
        with pytest.raises(swapper.ChecksumError, match="layer 2"):
            generate(model, inputs, cache, 1)
        assert {layer.get_seq_length() for layer in cache.layers} == {299}


def test_a_saved_context_goes_on_by_blocks_and_a_changed_byte_is_found(small, tmp_path):
    check_saved(small, tmp_path / "context.pt")


def test_a_block_that_cannot_be_read_takes_the_step_back(small, monkeypatch):
    model, inputs = make("llama"), prompt(4, 300)
    step = {"input_ids": inputs["input_ids"][:, :1], "attention_mask": torch.ones(4, 301, dtype=torch.int64)}
    plain = DynamicCache(config=model.config)
    with KVCache(model, **small) as cache, torch.no_grad():
        for one in (plain, cache):
            model.set_attn_implementation("sdpa" if one is plain else NAME)
            model(inputs["input_ids"], cache=one)
        owner = cache._pages.owner
        blocks = owner._home.blocks

        def fail(rows, begin, end):
            yield next(blocks(rows, begin, end))
            if rows.index == 1:
                raise swapper.IoError("read", "x", 0, 1, errno.EIO)
            yield from list(blocks(rows, begin, end))[1:]

        monkeypatch.setattr(owner._home, "blocks", fail)
        with pytest.raises(swapper.IoError):
            model(**step, cache=cache)
        monkeypatch.undo()
        assert {layer.get_seq_length() for layer in cache.layers} == {300}
        found = model(**step, cache=cache).logits
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(found, model(**step, cache=plain).logits, rtol=1e-5, atol=1e-5)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_layer_that_does_not_fit_names_the_option(small):
    model = make("llama")
    with (
        KVCache(model, **{**small, "attention": None}) as cache,
        pytest.raises(swapper.BudgetError, match='attention="blocks"'),
    ):
        generate(model, prompt(4, 300), cache)


def test_a_budget_below_a_block_says_what_is_enough(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(**{**DECODER, "num_hidden_layers": 40, "hidden_size": 64, "intermediate_size": 64})
    model, inputs = AutoModelForCausalLM.from_config(config).eval(), prompt(2, 40)
    where = {"directory": tmp_path, "attention": "blocks"}
    expected = generate(model, inputs, None, 2)
    with (
        KVCache(model, host_memory="2MiB", **where) as cache,
        pytest.raises(swapper.BudgetError, match="a block of one token") as caught,
    ):
        generate(model, inputs, cache)
    with KVCache(model, host_memory=caught.value.smallest_bytes, **where) as cache:
        check_close(generate(model, inputs, cache, 2), expected)


def test_another_attention_is_refused_and_the_cache_is_as_it_was(small):
    model, inputs = make("llama"), prompt(4, 300)
    expected = generate(model, inputs, None, 3)
    with KVCache(model, **small) as cache:
        model.set_attn_implementation("sdpa")
        with pytest.raises(
            swapper.StateError, match=r"'sdpa' now, .* model.set_attn_implementation\('swapper_blocks'\)"
        ):
            generate(model, inputs, cache, 3)
        assert cache.get_seq_length() == 0
        model.set_attn_implementation(NAME)
        check_close(generate(model, inputs, cache, 3), expected)


def test_models_that_do_not_pass_keys_on_are_refused(small):
    latent = make_of_8_layers("latent")  # multiplies what is cached by a weight
    with KVCache(latent, **small) as cache, pytest.raises(swapper.UnsupportedError, match="code of its own"):
        generate(latent, prompt(), cache)
    torch.manual_seed(0)
    sizes = {"d_model": 64, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 300}
    biased = AutoModelForSeq2SeqLM.from_config(T5Config(**sizes, decoder_start_token_id=0)).eval()
    with KVCache(biased, **small) as own, KVCache(biased, **small) as cross:
        with pytest.raises(swapper.UnsupportedError, match="does not do position_bias"):
            generate(biased, prompt(), EncoderDecoderCache(own, cross))


def test_what_it_does_not_do_is_refused_by_name(small):
    model = make("llama")
    query, keys = torch.randn(1, 4, 3, 8), torch.randn(1, 4, 3, 8)
    for options in ({"dropout": 0.1}, {"output_attentions": True}, {"s_aux": torch.zeros(4)}):
        with pytest.raises(swapper.UnsupportedError, match=f"does not do {next(iter(options))}"):
            attention_by_blocks(model, query, keys, keys, None, **options)
    with pytest.raises(swapper.UnsupportedError, match="gradients"):
        attention_by_blocks(model, query.requires_grad_(), keys, keys, None)
    with torch.no_grad(), pytest.raises(swapper.UnsupportedError, match="4 dimensions"):
        attention_by_blocks(model, query, keys, keys, torch.ones(3, 3))
    with pytest.raises(swapper.ConfigError, match="attention='pages'"):
        KVCache(model, **{**small, "attention": "pages"})
    with pytest.raises(swapper.ConfigError, match="set on a model"):
        KVCache(model.config, **small)
    assert model.config._attn_implementation == "sdpa"


def test_keys_are_read_until_the_next_layer_is_used(small):
    model = make("llama")
    with KVCache(model, **small) as cache, torch.no_grad():
        keys, values = (torch.randn(1, 4, 2, 64) for _ in range(2))
        first, _ = cache.update(keys, values, 0)
        assert first.shape == (1, 4, 2, 64)
        assert first.dtype is torch.float32
        cache.update(keys, values, 1)
        with pytest.raises(swapper.StateError, match="until the next layer"):
            list(first.blocks())
        with pytest.raises(swapper.UnsupportedError, match="matmul"):
            torch.matmul(first, keys.mT)


def test_a_model_whose_attention_cannot_be_set_is_refused(small, monkeypatch):
    model = make("llama")
    monkeypatch.setattr(type(model), "set_attn_implementation", lambda self, name: None)
    with pytest.raises(swapper.UnsupportedError, match="code of its own"):
        KVCache(model, **small)
    assert model not in transformers_attention._set

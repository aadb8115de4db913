"""A cache of keys and values in pages gives what transformers' DynamicCache gives, bit for bit, whatever the budget."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
from pathlib import Path

import peft
import pytest
import torch
from torch.utils.serialization import config
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DeepseekV3Config,
    DynamicCache,
    EncoderDecoderCache,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    T5Config,
)

import swapper
from swapper import KVCache
from swapper.infer.kv import kv_file, kv_rows
from swapper.infer.kv.kv_home import HostRows
from swapper.infer.kv.kv_rows import PADDING_BYTES
from swapper.integrations.transformers import from_pretrained
from swapper.integrations.transformers_layers import PagedLayer
from swapper.paging.residency import COLD

SMALL = "2MiB"
"""Of the keys and values of each test, which are more."""
NEW_TOKENS = 20
DECODER = {
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
CONFIGS = {
    "full": LlamaConfig(**DECODER),
    "grouped": LlamaConfig(**{**DECODER, "num_key_value_heads": 2, "num_hidden_layers": 12}),
    "eager": LlamaConfig(**DECODER, attn_implementation="eager"),
    "sliding": MistralConfig(**DECODER, sliding_window=70),
    "both": Gemma2Config(**DECODER, sliding_window=40, head_dim=64),
    "gpt2": GPT2Config(
        n_embd=256,
        n_layer=8,
        n_head=4,
        vocab_size=300,
        n_positions=512,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    ),
    "latent": DeepseekV3Config(
        **DECODER,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=32,
        qk_nope_head_dim=64,
        v_head_dim=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        n_shared_experts=1,
    ),
}
WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampled": {"do_sample": True, "num_return_sequences": 2},
    "assisted": {"prompt_lookup_num_tokens": 3},
    "chunked": {"prefill_chunk_size": 32},
}


def make(name: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name]).to(dtype).eval()


def prompt(batch: int = 2, length: int = 100) -> dict[str, torch.Tensor]:
    """Ids, the first entry padded on the left."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 300, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[0, :9] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, inputs, cache, new_tokens=NEW_TOKENS, **options):
    torch.manual_seed(2)
    return model.generate(
        **inputs,
        max_new_tokens=new_tokens,
        cache=cache,
        return_dict_in_generate=True,
        output_logits=True,
        **{"do_sample": False, **options},
    )


def check_same(got, expected) -> None:
    assert torch.equal(got.sequences, expected.sequences)
    assert len(got.logits) == len(expected.logits)
    assert all(map(torch.equal, got.logits, expected.logits))


@pytest.fixture
def small(tmp_path):
    return {"host_memory": SMALL, "directory": tmp_path}


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


def next_turn(sequences, *caches):
    """Take the last seven tokens back, and return the inputs of a turn that goes on from there."""
    for one in caches:
        one.crop(-7)
    ids = torch.cat([sequences[:, :-6], prompt(1, 9)["input_ids"]], 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


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


def check_dropping(model, options, is_used=lambda: True):
    """Drop a cache: this process has as many descriptors as before it was made."""

    def descriptors():
        return len(list(Path("/proc/self/fd").iterdir()))

    generate(model, prompt(), KVCache(model, **options))
    gc.collect()
    before = descriptors()
    cache = KVCache(model, **options)
    generate(model, prompt(), cache)
    assert descriptors() > before
    assert is_used()
    del cache
    assert descriptors() == before


def test_a_dropped_cache_gives_memory_and_file_back(small):
    check_dropping(make("full"), small)
    assert list(small["directory"].iterdir()) == []


# --- saved contexts ---------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path, small):
    """A model, the path of a context of 99 tokens of the prompt, and what follows it."""

    def save(name="full", dtype=torch.float32):
        model, path = make(name, dtype), tmp_path / "context.pt"
        inputs = {"input_ids": prompt()["input_ids"], "attention_mask": torch.ones(2, 100, dtype=torch.int64)}
        plain = DynamicCache(config=model.config)
        with KVCache(model, **small) as cache, torch.no_grad():
            for one in (plain, cache):
                model(inputs["input_ids"][:, :99], cache=one)
            cache.save(path, tokens=inputs["input_ids"])
        expected = generate(model, inputs, plain)
        return model, path, inputs, expected

    return save


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_context_goes_on(name, dtype, saved, small):
    model, path, inputs, expected = saved(name, dtype)
    content = torch.load(path)
    assert content["kv_cache"]["position"] == 99
    assert torch.equal(content["tokens"], inputs["input_ids"][:, :99])
    with config.patch({"load.calculate_storage_offsets": True}):
        calculated = torch.load(path)
    assert torch.equal(calculated["layers"]["7"]["values"], content["layers"]["7"]["values"])
    bytes_before = path.read_bytes()
    caches = [KVCache.open(path, model, tokens=inputs["input_ids"], **small) for _ in range(2)]
    for cache in caches:  # the second one after the first has added to its own
        with cache:
            first = cache.layers[0].keys.clone()
            assert torch.equal(first, content["layers"]["0"]["keys"])
            check_same(generate(model, inputs, cache), expected)
    assert path.read_bytes() == bytes_before


@pytest.mark.parametrize("name", ["sliding", "both"])
def test_a_context_of_an_assisted_generation_is_saved(name, small, tmp_path):
    """Assisted decoding has windows keep what is before them, to take tokens back: a file has the window alone."""
    model, inputs, path = make(name), prompt(1), tmp_path / "context.pt"
    plain = DynamicCache(config=model.config)
    with KVCache(model, **small) as cache:
        for one in (plain, cache):
            text = generate(model, inputs, one, **WAYS["assisted"]).sequences
        cache.save(path, tokens=text)
    expected = generate(model, {"input_ids": text}, plain)
    with KVCache.open(path, model, tokens=text, **small) as cache:
        check_same(generate(model, {"input_ids": text}, cache), expected)


def test_a_context_that_goes_on_is_saved_over_itself(saved, small):
    model, path, inputs, expected = saved()
    with KVCache.open(path, model, **small) as cache:
        generate(model, inputs, cache)
        cache.save(path, tokens=expected.sequences)
        assert cache.get_seq_length() == 119
        again = generate(model, {"input_ids": expected.sequences}, expected.past_key_values, new_tokens=5)
        check_same(generate(model, {"input_ids": expected.sequences}, cache, new_tokens=5), again)
    with KVCache.open(path, model, tokens=expected.sequences, **small) as cache:
        check_same(generate(model, {"input_ids": expected.sequences}, cache, new_tokens=5), again)


def test_a_saved_context_is_refused_for_another_model_or_other_tokens(saved, small):
    model, path, inputs, _ = saved()
    other = make("full")
    with torch.no_grad():
        other.model.layers[3].mlp.up_proj.weight[-1, -1] += 1
    for wrong in (other, make("full", torch.bfloat16), make("gpt2")):
        with pytest.raises(swapper.CheckpointError, match="of another model"):
            KVCache.open(path, wrong, **small)
    tokens = inputs["input_ids"].clone()
    tokens[1, 50] += 1
    with pytest.raises(swapper.CheckpointError, match="of other tokens"):
        KVCache.open(path, model, tokens=tokens, **small)
    with pytest.raises(swapper.CheckpointError, match="of other tokens"):
        KVCache.open(path, model, tokens=inputs["input_ids"][:, :50], **small)


@pytest.mark.parametrize("layer", [0, 7])
def test_a_changed_byte_is_found(layer, saved, small):
    model, path, inputs, _ = saved()
    content = torch.load(path, mmap=True)
    keys = content["layers"][str(layer)]["keys"]
    raw = path.read_bytes()
    at = raw.index(keys[1, 3, 60].numpy().tobytes())
    del content, keys
    path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
    cache = KVCache.open(path, model, **small)
    with cache, pytest.raises(swapper.ChecksumError, match=f"layer {layer}"):
        generate(model, inputs, cache)


def test_files_that_are_no_contexts_are_refused(saved, small, tmp_path):
    model, path, inputs, _ = saved()
    raw = path.read_bytes()
    torch.save({"kv_cache": {"format": 3, "model": "", "position": 3}}, tmp_path / "later.pt")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    content = torch.load(path)
    torch.save(content, tmp_path / "saved again.pt")
    keys = content["layers"]["0"]["keys"]
    batch, heads, row, width = keys.stride()
    for name, stride in (("far apart.pt", row + 16), ("overlapping.pt", row - 16)):
        content["layers"]["0"]["keys"] = keys[:, :, :90].as_strided(
            (*keys.shape[:2], 90, keys.shape[3]), (batch, heads, stride, width)
        )
        torch.save(content, tmp_path / name)
    (tmp_path / "cut.pt").write_bytes(raw[: len(raw) // 2])
    (tmp_path / "text.pt").write_text("no zip")
    for name in ("later.pt", "weights.pt", "cut.pt", "text.pt", "saved again.pt", "far apart.pt", "overlapping.pt"):
        with pytest.raises(swapper.CheckpointError, match=name):
            KVCache.open(tmp_path / name, model, **small)
    with pytest.raises(swapper.IoError):
        KVCache.open(tmp_path / "missing.pt", model, **small)
    with KVCache.open(path, model, **small) as cache:
        os.utime(path)
        with pytest.raises(swapper.CheckpointError, match="was changed while it is in use"):
            generate(model, inputs, cache)


def test_rows_are_padded_with_zeros_and_files_without_padding_go_on(saved, small, monkeypatch):
    """Of format 1, whose rows have no padding."""
    model, path, inputs, expected = saved()
    keys, row = torch.load(path)["layers"]["0"]["keys"], 2 * 2 * 4 * 64
    assert keys.stride()[2] == row + PADDING_BYTES // 4
    rows = torch.empty(0).set_(keys.untyped_storage()).view(99, -1)
    assert rows[:, :row].count_nonzero() > 99 * row // 2
    assert rows[:, row:].view(torch.int32).count_nonzero() == 0
    raw = path.read_bytes()
    assert saved()[1].read_bytes() == raw
    monkeypatch.setattr(kv_rows, "PADDING_BYTES", 0)
    monkeypatch.setattr(kv_file, "FORMAT", 1)
    saved()
    monkeypatch.undo()
    assert torch.load(path)["layers"]["0"]["keys"].stride()[2] == row
    for repeats in (1, 2):
        with KVCache.open(path, model, tokens=inputs["input_ids"], **small) as cache:
            check_same(generate(model, inputs, cache), expected)
            if repeats == 2:
                for one in (cache, expected.past_key_values):
                    one.batch_repeat_interleave(2)
                ids = {"input_ids": expected.sequences.repeat_interleave(2, 0)}
                check_same(generate(model, ids, cache), generate(model, ids, expected.past_key_values))


def test_an_existing_file_is_kept_if_that_is_asked_for(saved, small):
    model, path, inputs, _ = saved()
    raw = path.read_bytes()
    with KVCache(model, **small) as cache:
        with pytest.raises(swapper.StateError, match="nothing is in this KVCache"):
            cache.save(path)
        generate(model, inputs, cache)
        with pytest.raises(swapper.CheckpointError, match="exists already"):
            cache.save(path, overwrite=False)
        with pytest.raises(swapper.ConfigError, match="tokens= has shape"):
            cache.save(path, tokens=inputs["input_ids"])
    assert path.read_bytes() == raw


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
        KVCache(model, host_memory=SMALL, directory=tmp_path / "missing")
    with pytest.raises(swapper.ConfigError, match="is in memory"):
        KVCache(model, host_memory=SMALL, directory=Path("/dev/shm"))


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

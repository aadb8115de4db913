"""A context that a KVCache saved goes on in another one; what is no context of the model is refused."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils.serialization import config
from transformers import DynamicCache

import swapper
from infer.kv_models import CONFIGS, WAYS, check_same, generate, make, prompt
from swapper import KVCache
from swapper.infer.kv import kv_file, kv_rows
from swapper.infer.kv.kv_rows import PADDING_BYTES


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


def test_a_saved_context_goes_on_with_weights_that_lie_otherwise_in_memory(saved, small):
    model, path, _, _ = saved()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = torch.stack([parameter, parameter], -1)[..., 0]
    with KVCache.open(path, model, **small) as cache:
        assert cache.get_seq_length() == 99


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

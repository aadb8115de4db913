"""A KVCache on a drive that is full in the middle of a generation."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from infer.host_device import HostDevice
from transformers import LlamaConfig, LlamaForCausalLM

import swapper
from swapper import KVCache


def make(monkeypatch: pytest.MonkeyPatch) -> LlamaForCausalLM:
    monkeypatch.setattr(
        "swapper.integrations.transformers_cache.is_in_memory", lambda path: False
    )  # what stands for a drive is
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=256,
            intermediate_size=256,
            num_hidden_layers=8,
            num_attention_heads=4,
            vocab_size=300,
            max_position_embeddings=512,
            eos_token_id=None,
            pad_token_id=0,
        )
    ).eval()


@pytest.mark.parametrize("where", ["cpu", "blocks", "late", "late blocks"])
def test_a_drive_that_is_full_in_a_generation_keeps_the_text(
    where: str, small_drive: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = small_drive(12 << 20)
    model = make(monkeypatch)
    ids = torch.randint(2, 300, (1, 250))

    def generate(ids: torch.Tensor, cache: object, count: int) -> torch.Tensor:
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, cache=cache
        )

    expected = generate(ids, None, 200)
    others = drive / "others"
    others.write_bytes(bytes(10 << 20))
    there: dict[str, Any] = {
        "cpu": {},
        "blocks": {"attention": "blocks"},
        "late": {"device": HostDevice("late"), "device_memory": "1.5MiB"},
        "late blocks": {"device": HostDevice("late"), "device_memory": "128KiB", "attention": "blocks"},
    }[where]
    with KVCache(model, host_memory="4MiB", directory=drive, **there) as cache:
        with pytest.raises(swapper.IoError) as caught:
            generate(ids, cache, 200)
        assert caught.value.errno == errno.ENOSPC
        count = cache.get_seq_length()
        assert 250 <= count < 449
        assert {layer.get_seq_length() for layer in cache.layers} == {count}
        others.unlink()
        text = expected[:, : count + 1]
        assert torch.equal(generate(text, cache, 450 - text.shape[1]), expected)


def test_a_reorder_that_a_full_drive_ends_is_not_half_believed(
    small_drive: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = small_drive(12 << 20)
    model = make(monkeypatch)
    ids = torch.randint(2, 300, (2, 220))
    with KVCache(model, host_memory="4MiB", directory=drive) as cache, torch.no_grad():
        expected = model(ids, cache=cache).logits
        others = drive / "others"
        with others.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(1 << 12))
        with pytest.raises(swapper.IoError):
            for _ in range(4):
                cache.reorder_cache(torch.tensor([1, 0]))
        others.unlink()
        with pytest.raises(swapper.StateError, match="was reordered"):
            model(ids[:, :1], cache=cache)
        cache.reset()
        assert torch.equal(model(ids, cache=cache).logits, expected)


def test_a_write_that_fails_while_a_turn_ends_loses_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step raises it. At each token: the page of some is a new one, which its layer's next turn must read."""
    model, ids = make(monkeypatch), torch.randint(2, 300, (1, 300))
    there: dict[str, Any] = {"device": HostDevice("late"), "device_memory": "1.5MiB"}
    with torch.no_grad(), KVCache(model, host_memory="4MiB", directory=tmp_path, **there) as cache:
        expected = model(ids, use_cache=False).logits
        model(ids[:, :280], cache=cache)
        failed = 0
        for count in range(280, 300):
            cache._pages.owner.pager.raise_later(swapper.IoError("write", "x", 0, 1, errno.ENOSPC, "as asked for"))
            while True:
                try:
                    logits = model(ids[:, count : count + 1], cache=cache).logits
                    break
                except swapper.IoError:
                    failed += 1
                    assert cache.get_seq_length() == count
            torch.testing.assert_close(logits[:, 0], expected[:, count])
        assert failed == 20

"""Gives models of transformers attention by blocks of keys, which a KVCache reads from its pages one after the other.

transformers knows it as "swapper_blocks". Of ordinary keys it computes the same.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from swapper.errors import ConfigError, StateError, UnsupportedError
from swapper.infer.kv.kv_attention import InPages, Mask, attend, pieces

NAME = "swapper_blocks"

_lock = threading.RLock()  # a cache may be dropped, and so closed, anywhere
_set: weakref.WeakKeyDictionary[nn.Module, list[dict[str, str]]] = weakref.WeakKeyDictionary()
"""Models that compute attention by blocks: for each cache, what the model did before it."""


def set_on(model: Any) -> Callable[[], None]:
    """Have a model compute attention by blocks. Return what ends that; the last one has the model do as before.

    Raises:
        ConfigError: it is only a config.
        UnsupportedError: it computes attention by code of its own.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f'attention="blocks" is set on a model: pass it, and not its {type(model).__name__}')
    config: Any = model.config
    parts = {"": config, **{key: getattr(config, key, None) for key in config.sub_configs}}
    with _lock:
        before = {key: part._attn_implementation for key, part in parts.items() if part is not None}
        set_attention: Any = model.set_attn_implementation
        set_attention(NAME)
        if config.get_text_config(decoder=True)._attn_implementation != NAME:
            raise UnsupportedError(
                f"{type(model).__name__} computes attention by code of its own, not by transformers' AttentionInterface: take "
                "KVCache without attention="
            )
        _set.setdefault(model, []).append(before)
    return partial(_end, weakref.ref(model))


def _end(model: weakref.ref[Any]) -> None:
    found = model()
    if found is not None:
        with _lock:
            before = _set[found].pop()
            if not _set[found]:
                found.set_attn_implementation(before)


def check_set(config: Any) -> None:
    """Raise StateError unless the model with this config, a decoder's, computes attention by blocks."""
    if config._attn_implementation != NAME:
        raise StateError(
            f"the model's attention is {config._attn_implementation!r} now, and this KVCache is for attention by blocks: call "
            f"model.set_attn_implementation({NAME!r})"
        )


def attention_by_blocks(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | Mask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Return what `sdpa_attention_forward` of transformers does, but for the last bits, of shape (batch, queries, heads, width).

    Args:
        module: the model's.
        query, key, value: of shape (batch, heads, tokens, width); keys and values may be `InPages`.
        attention_mask: of `mask_for_blocks`; or of shape (batch or 1, heads or 1, queries, keys), bool, or added to scores.
        dropout: must be 0.
        scaling: of scores; None: 1 / √width.
        is_causal: without a mask; None: as the module says.
        softcap: see `attend`.
        others: options that do not change results.

    Raises:
        UnsupportedError: an option would change results, or autograd records.
        IoError, ChecksumError: a block could not be read. The cache has the tokens from before this forward.
    """
    _refuse(query, dropout, others)
    blocks = key.blocks() if isinstance(key, InPages) else pieces(key, value)
    if attention_mask is None and query.shape[2] > 1:
        says = getattr(module, "is_causal", True) if is_causal is None else is_causal
        offset = key.shape[2] - query.shape[2]
        attention_mask = mask_for_blocks(batch_size=1, q_offset=offset, device=query.device) if says else None
    mask = _of_tensor(attention_mask, query) if isinstance(attention_mask, torch.Tensor) else attention_mask
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    found = attend(query, (key.shape[1], value.shape[3]), blocks, mask, scaling, softcap)
    return found.transpose(1, 2).contiguous(), None


def mask_for_blocks(*, q_offset: int = 0, kv_offset: int = 0, **arguments: Any) -> Mask:
    """Return which keys are seen: a mask that is made for each block when it is needed.

    Args:
        q_offset, kv_offset: positions of the first query and the first key.
        arguments: the others of transformers' `sdpa_mask`.

    Raises:
        TypeError: on use, there are others.
    """
    arguments |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}

    def mask(first: int, last: int, begin: int, end: int) -> torch.Tensor:
        found = sdpa_mask(
            **{
                **arguments,
                "q_length": last - first,
                "kv_length": end - begin,
                "q_offset": q_offset + first,
                "kv_offset": kv_offset + begin,
            }
        )
        assert found is not None
        return found

    return mask


def _of_tensor(mask: torch.Tensor, query: torch.Tensor) -> Mask:
    if mask.dim() != 4:
        raise UnsupportedError(f"attention by blocks takes masks of 4 dimensions, and not of shape {tuple(mask.shape)}")
    whole = mask.expand(-1, -1, query.shape[2], -1)
    return lambda first, last, begin, end: whole[:, :, first:last, begin:end]


def _refuse(query: torch.Tensor, dropout: float, others: dict[str, Any]) -> None:
    """Raise UnsupportedError for what attention by blocks does not do."""
    tensors = [name for name, one in others.items() if isinstance(one, torch.Tensor) and one.is_floating_point()]
    refused = {
        "dropout": dropout > 0,
        "output_attentions": others.get("output_attentions"),
        "gradients": torch.is_grad_enabled() and query.requires_grad,
        **dict.fromkeys(tensors, True),
    }
    names = [name for name, is_there in refused.items() if is_there]
    if names:
        raise UnsupportedError(
            f"attention by blocks ({NAME}) does not do {', '.join(names)}: take KVCache without attention="
        )


AttentionInterface.register(NAME, attention_by_blocks)
AttentionMaskInterface.register(NAME, mask_for_blocks)

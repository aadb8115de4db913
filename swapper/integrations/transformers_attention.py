"""Gives models of transformers attention by blocks of keys, which a KVCache reads from its pages one after the other.

transformers knows it as "swapper_blocks". Of ordinary keys it computes the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from swapper.errors import ConfigError, StateError, UnsupportedError
from swapper.infer.kv.kv_attention import Mask, attend, pieces
from swapper.tensors.guarded_tensor import METADATA
from swapper.tensors.torch_private import without_torch_functions

NAME = "swapper_blocks"

Blocks = Iterator[tuple[torch.Tensor, torch.Tensor]]


class InPages(torch.Tensor):
    """Stands for the keys, or the values, of a layer, with their shape and dtype, on the meta device.

    Attributes:
        blocks: returns keys and values, block by block.

    Raises:
        UnsupportedError: they are used otherwise.
    """

    blocks: Callable[[], Blocks]

    @classmethod
    def like(cls, new: torch.Tensor, tokens: int, blocks: Callable[[], Blocks]) -> InPages:
        """Return what stands for `tokens` tokens like the new ones, of shape (batch, heads, tokens, width)."""
        shape = (*new.shape[:2], tokens, new.shape[3])
        made: InPages = torch.empty(shape, dtype=new.dtype, device="meta").as_subclass(cls)
        made.blocks = blocks
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in METADATA:
            with without_torch_functions():
                return func(*args, **(kwargs or {}))
        raise UnsupportedError(
            f'{getattr(func, "__name__", func)} is not done with keys and values of KVCache(..., attention="blocks"): this model '
            "computes attention by code of its own. Take KVCache without attention="
        )


def set_on(model: Any) -> Callable[[], None]:
    """Have the model compute attention by blocks. Return what has it do as before.

    Raises:
        ConfigError: it is only a config.
        UnsupportedError: it computes attention by code of its own.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f'attention="blocks" is set on a model: pass it, and not its {type(model).__name__}')
    config: Any = model.config
    before = {"": config._attn_implementation}
    before |= {
        key: getattr(config, key)._attn_implementation for key in config.sub_configs if getattr(config, key, None)
    }
    set_attention: Any = model.set_attn_implementation
    set_attention(NAME)
    if config.get_text_config(decoder=True)._attn_implementation != NAME:
        raise UnsupportedError(
            f"{type(model).__name__} computes attention by code of its own, not by transformers' AttentionInterface: take KVCache "
            "without attention="
        )
    return partial(_set_again, weakref.ref(model), before)


def _set_again(model: weakref.ref[Any], before: dict[str, str]) -> None:
    found = model()
    if found is not None:
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
    """Return which keys are seen, made for each block when it is needed. Args: those of transformers' `sdpa_mask`."""
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

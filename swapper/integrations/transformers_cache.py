"""Defines KVCache: a cache of transformers whose keys and values are in pages, in host memory or on NVMe.

    cache = swapper.KVCache(model, host_memory="4GiB", directory="/mnt/nvme")
    model.generate(**inputs, cache=cache)

transformers decides what a layer keeps, swapper/infer/kv where that is. Results are those of `DynamicCache`, bit for bit.
"""

from __future__ import annotations

import json
import os
import tempfile
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from swapper.device.device import Device
from swapper.device.model_device import DeviceBudget
from swapper.errors import CheckpointError, ConfigError, StateError, UnsupportedError
from swapper.infer.kv import kv_file
from swapper.integrations.transformers_attention import set_on
from swapper.integrations.transformers_layers import LayerPages, PagedLayer
from swapper.integrations.transformers_sliding import PagedSlidingLayer
from swapper.io.engines import is_in_memory
from swapper.io.tensor_bytes import copy_out, flat_bytes
from swapper.options import parse_host_memory
from swapper.runtime.counters import Counters

MIN_RESERVED_TOKENS, MAX_RESERVED_TOKENS = 1 << 10, 1 << 16
"""Tokens that a layer gets addresses for at once, if nothing says how many there will be; more are moved to others."""
EDGE_ELEMENTS = 16
"""Of each weight, first and last, that tell models with other weights apart: a choice."""


class KVCache(DynamicCache):
    """Keys and values of attention, on the model's device and in host memory as far as budgets go, and in a file for the rest.

    Any model of transformers takes it as `cache=` (`past_key_values=` in older releases), in `generate` and in a forward under
    `torch.no_grad()`.
    The next layer's pages are read while one computes, and those of a prefill are written while the next layer computes.
    Close it, or drop it: its memory and its file end with it.

    Args:
        model: with a `config`, or the config.
        host_memory: bytes, or "4GiB", of keys and values in memory. On a CPU one layer must fit, and two to read ahead.
            "auto": half of the free memory, at most what `max_tokens` take.
        device: that the model computes on. None: that of its parameters; of a config, the CPU.
        device_memory: bytes of keys and values on an accelerator. Layers that do not fit are copied there for their turn: one
            must fit, and two more than those that stay to copy ahead. "auto": half of what is free there now.
        directory: of the scratch file, on a drive. None: the directory for temporary files.
        max_tokens: of the longest sequence, prompt and output. It may be exceeded, by copying. None: the model's
            `max_position_embeddings`, at most 65,536.
        attention: "blocks": one layer may be larger than `host_memory`, which needs a few blocks of it, or `device_memory`, which
            needs two. The model computes attention block by block until this cache is closed: its attention is "swapper_blocks",
            an online softmax in fp32, whose results are other ones in the last bits. None: whole layers, exact.
        backend: of the engine; see `SwapManager`.

    Attributes:
        counters: bytes read and written, waits.

    Raises:
        ConfigError: an option makes no sense, or the directory is in memory.
        DeviceError: there is no such device.
        UnsupportedError: the model has layers whose cache is not just keys and values, or computes attention by code of its own
            and should do it by blocks. Of a model, a forward with `use_cache=False` raises ConfigError.
    """

    def __init__(
        self,
        model: Any,
        *,
        host_memory: int | str = "auto",
        device: str | torch.device | Device | None = None,
        device_memory: int | str = "auto",
        directory: str | os.PathLike[str] | None = None,
        max_tokens: int | None = None,
        attention: str | None = None,
        backend: str = "auto",
    ) -> None:
        config = getattr(model, "config", model)
        if not hasattr(config, "get_text_config"):
            raise ConfigError(f"KVCache needs a model of transformers, or its config, and not {type(model).__name__}")
        if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
            raise ConfigError(f"max_tokens={max_tokens!r} must be a positive number of tokens, or None")
        if attention not in (None, "blocks"):
            raise ConfigError(f'attention={attention!r} must be "blocks", or None')
        super().__init__(config=config)
        self.counters = Counters(read_bytes={"kv": 0}, written_bytes={"kv": 0})
        decoder = config.get_text_config(decoder=True)
        known = getattr(decoder, "max_position_embeddings", None)
        reserved = max_tokens or min(known or MIN_RESERVED_TOKENS, MAX_RESERVED_TOKENS)
        host_bytes = parse_host_memory(host_memory)
        budget = DeviceBudget.parse(_device_of(model) if device is None else device, device_memory)
        self._pages = LayerPages(
            host_bytes,
            host_memory == "auto",
            _scratch_directory(directory),
            reserved,
            backend,
            self.counters,
            budget,
            None if attention is None else decoder,
        )
        self.layers = [_paged(layer, self._pages, index) for index, layer in enumerate(self.layers)]
        self._pages.layers = [layer for layer in self.layers if isinstance(layer, PagedLayer)]
        self._model = weakref.ref(model) if isinstance(model, nn.Module) else None
        self._config = config
        undo = [] if attention is None else [set_on(model)]
        if isinstance(model, nn.Module):
            called = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), model)
            undo.append(called.register_forward_pre_hook(_UseCheck(self), with_kwargs=True).remove)
        self._end = weakref.finalize(self, _end, self._pages, undo)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        tokens: torch.Tensor | None = None,
        overwrite: bool = True,
        durable: bool = True,
        progress: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Save keys and values as a torch checkpoint, which `KVCache.open` reads in place, and `torch.load` too.

        Of a layer with a sliding window those of the window are saved, without what assisted decoding keeps to take back.

        Args:
            path: a file name. Missing directories above it are made.
            tokens: of the context, integers of shape (batch, at least as many as went through the model): `open` compares them.
                Those beyond are left out.
            overwrite: False refuses an existing file.
            durable: return when the file would survive a power loss.
            progress: called with the number of bytes, whenever some are written.

        Raises:
            StateError: nothing is in the cache, or it is closed.
            ConfigError: `tokens` are fewer than are in the cache, or of another batch.
            CheckpointError: the path is not allowed.
            IoError: the drive failed, or is full. Nothing is left under the name.
        """
        rows = {of.index: (of.rows, of.seen_count) for of in self._pages.layers if of.rows is not None and of.count}
        if not rows:
            raise StateError("nothing is in this KVCache yet: save it after a forward or a generate")
        position = self.get_seq_length()
        if tokens is not None:
            batch = next(iter(rows.values()))[0].shape.batch
            if tokens.dim() != 2 or tokens.shape[0] != batch or tokens.shape[1] < position:
                raise ConfigError(
                    f"tokens= has shape {tuple(tokens.shape)}, and the KVCache {position} tokens of a batch of {batch}: give all "
                    "ids that went through the model, as generate returns them"
                )
            tokens = tokens[:, :position]
        kv_file.write(
            path,
            self._pages.owner,
            rows,
            model=self._fingerprint(),
            position=position,
            tokens=tokens,
            overwrite=overwrite,
            durable=durable,
            moved=progress,
        )

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], model: Any, *, tokens: torch.Tensor | None = None, **options: Any
    ) -> KVCache:
        """Return a cache with the context that `save` wrote. Its rows are read from that file, as they are needed.

        The file is never written to: several caches may continue from it, each with a scratch file for what it adds.

        Args:
            path: of the file.
            model: whose context it is.
            tokens: of the context or longer, to be compared with the saved ones; None: they are not.
            options: those of KVCache.

        Raises:
            CheckpointError: the file is damaged, or of another model, other tokens or another dtype.
            IoError: it cannot be read.
            ConfigError, DeviceError, UnsupportedError: as KVCache.
        """
        saved = kv_file.read(path)
        cache = cls(model, **options)
        try:
            _check_same(saved, cache._fingerprint(), tokens)
            cache._pages.open_saved(saved)
        except BaseException:
            cache.close()
            raise
        return cache

    def close(self) -> None:
        """Free memory and file. Keys and values that were returned may not be used any more. May be called again."""
        self._end()

    def _fingerprint(self) -> str:
        model = None if self._model is None else self._model()
        return f"{_crc32_of_config(self._config)} {'-' if model is None else _crc32_of_weights(model)}"

    def __enter__(self) -> KVCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise UnsupportedError("a KVCache is not copied: make another one, and give it the same tokens")

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError("a KVCache is not pickled: its pages are in memory and files of this process")


def _end(pages: LayerPages, undo: Sequence[Callable[[], None]]) -> None:
    """Close the pages, and have the model compute attention as before."""
    try:
        pages.close()
    finally:
        for one in undo:
            one()


class _UseCheck:
    """A hook of a model, the one that `generate` calls within wrappers (PEFT, torch.compile): a forward that gets this cache may
    use it. If not, generate gives it the whole text at each token."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = weakref.ref(cache)

    def __call__(self, model: nn.Module, args: object, kwargs: Mapping[str, Any]) -> None:
        """Raise ConfigError if it may not."""
        cache = self._cache()
        if cache is None or kwargs.get("use_cache") is not False:
            return
        if any(cache is of for one in kwargs.values() for of in (one, getattr(one, "self_attention_cache", None))):
            raise ConfigError(
                "use_cache=False with a KVCache: each token would add the whole text to the cache again. Leave the cache out, "
                "or give use_cache=True (also where model.generation_config says False)"
            )

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        """Copies and pickles of the model have a hook that does nothing and needs no swapper."""
        return getattr, (nullcontext(), "__exit__")


def _paged(layer: Any, pages: LayerPages, index: int) -> Any:
    """Return the layer that keeps in pages what `layer` keeps in memory."""
    if type(layer) is DynamicLayer:
        return PagedLayer(pages, index)
    if type(layer) is DynamicSlidingWindowLayer:
        return PagedSlidingLayer(pages, index, sliding_window=layer.sliding_window)
    if not isinstance(
        layer, CacheLayerMixin
    ):  # without keys: states of linear attention, layers that share others' keys
        return layer
    raise UnsupportedError(
        f"layer {index} keeps more than keys and values ({type(layer).__name__}): take transformers' DynamicCache for this model"
    )


def _device_of(model: Any) -> str | torch.device:
    """Return the accelerator that parameters of a model are on; the CPU if none is."""
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    return next((one.device for one in parameters if one.device.type not in ("cpu", "meta")), "cpu")


def _scratch_directory(directory: str | os.PathLike[str] | None) -> Path:
    found = Path(tempfile.gettempdir() if directory is None else directory)
    if not found.is_dir():
        raise ConfigError(f"directory={os.fspath(found)!r} of a KVCache is not there: make it, or name another")
    if is_in_memory(found / "x"):
        raise ConfigError(f"{found} is in memory: name a directory= on a drive, for what does not fit host_memory")
    return found


OF_POSITIONS = ("model_type", "rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "layer_types")
"""What a configuration says, besides shapes, that changes keys."""


def _crc32_of_config(config: Any) -> str:
    decoder = config.get_text_config(decoder=True)
    said = {name: repr(getattr(decoder, name, None)) for name in OF_POSITIONS}
    return f"{zlib.crc32(json.dumps(said, sort_keys=True).encode()):08x}"


def _crc32_of_weights(model: nn.Module) -> str:
    """Return a checksum of names, shapes, dtypes, and of both ends of each weight. Reads a few bytes of each."""
    found = 0
    for name, tensor in model.state_dict().items():
        found = zlib.crc32(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode(), found)
        count = min(EDGE_ELEMENTS, tensor.numel())
        for start in (0, tensor.numel() - count):
            end = torch.empty(count, dtype=tensor.dtype, device=tensor.device)
            copy_out(tensor.detach(), start, start + count, end)
            found = zlib.crc32(flat_bytes(end.cpu()).numpy().tobytes(), found)
    return f"{found:08x}"


def _check_same(saved: kv_file.SavedContext, fingerprint: str, tokens: torch.Tensor | None) -> None:
    """Raise CheckpointError unless a saved context is of the model with this fingerprint, and begins with these tokens."""
    config, weights = fingerprint.split()
    its_config, _, its_weights = saved.model.partition(" ")
    if config != its_config or ("-" not in (weights, its_weights) and weights != its_weights):
        raise CheckpointError(
            f"{saved.path} is the context of another model, or of other weights: make it again with this one"
        )
    if tokens is None or saved.tokens is None:
        return
    given = tokens.detach().to("cpu", torch.int64)[..., : saved.position]
    if given.shape != saved.tokens.shape or not torch.equal(given, saved.tokens):
        raise CheckpointError(
            f"{saved.path} is the context of other tokens (or of another tokenizer): it has {saved.position} of a batch of "
            f"{saved.tokens.shape[0]}, and yours differ from them"
        )

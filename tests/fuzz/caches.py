"""Calls models with a KVCache and with transformers' DynamicCache, as programs drawn from a seed say; both must agree bit for bit.

Usage: tools/fuzz caches [--minutes N] [--cases N] [--seed N] [--program JSON]

A program is a small model, options of `KVCache`, and calls: forwards, generations of every kind, and what takes tokens or
entries of the batch away. With attention by blocks, results in fp32 are about the same. A context is saved and opened; several
caches go on from one file. On a CPU, views of keys are held while tokens are added. Where a budget ends in a forward, the cache
is as before. Each program runs in a process of its own (cases.py).
"""

from __future__ import annotations

import copy
import gc
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from infer.host_device import ORDERS, HostDevice
from infer.kv_models import DECODER, KINDS, WAYS, config_of
from transformers import AutoModelForCausalLM, DynamicCache

from fuzz.cases import Impossible, Kind, Program, equal, outcome, run
from swapper import KVCache
from swapper.errors import BudgetError, UnsupportedError

VOCABULARY = DECODER["vocab_size"]
WINDOWS = {"sliding": 13, "both": 30}
SEVERAL_OF_EACH = ("beams", "sampled")
"""Ways that make several entries of each, of a cache that has none."""
PLAIN = {
    "attention": None,
    "config": "full",
    "layers": 1,
    "dtype": "float32",
    "device": None,
    "tokens": None,
    "room": 16 << 20,
}
"""What a smaller program has, where it fails so too."""
MAX_TOKENS = 300
NEAR = 1e-4
"""Relative and absolute, of fp32 with attention by blocks."""


class Pair:
    """A cache of each kind, with the same tokens."""

    def __init__(self, plain: DynamicCache, paged: KVCache) -> None:
        self.plain, self.paged = plain, paged
        self.held: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def length(self) -> int:
        return int(self.plain.get_seq_length())

    @property
    def batch(self) -> int:
        keys = self.plain.layers[0].keys
        return 0 if keys is None or keys.dim() < 4 else len(keys)


class Reading:
    """The model of a program, and its caches."""

    def __init__(self, program: Program, directory: Path) -> None:
        torch.manual_seed(program["seed"])
        name = program["config"]
        window = {"sliding_window": WINDOWS[name]} if name in WINDOWS else {}
        config = config_of(name, num_hidden_layers=program["layers"], **window)
        dtype = getattr(torch, program["dtype"])
        self.model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
        self.reference = copy.deepcopy(self.model)
        self.program, self.directory = program, directory
        self.by_blocks = program["attention"] is not None
        self.device = None if program["device"] is None else HostDevice(program["device"])
        self.scratch = directory / "scratch"
        self.scratch.mkdir()
        self.files = 0
        self.caches: list[KVCache] = []
        self.pairs = [Pair(DynamicCache(config=config), self.make(KVCache))]

    def make(self, made_by: Callable[..., KVCache], *arguments: Any) -> KVCache:
        """Return a cache with the program's budgets."""
        there: dict[str, Any] = {}
        if self.device is not None:
            there = {"device": self.device, "device_memory": self.program["room"]}
        cache = made_by(
            *arguments,
            self.model,
            host_memory=self.program["room"],
            directory=self.scratch,
            max_tokens=self.program["tokens"],
            attention=self.program["attention"],
            **there,
        )
        self.caches.append(cache)
        return cache

    def run(self) -> None:
        """Raises AssertionError where they differ."""
        for number, (name, seed) in enumerate(self.program["calls"]):
            chance = random.Random(seed)
            pair = chance.choice(self.pairs)
            if pair.length > MAX_TOKENS:
                continue
            try:
                if name not in KEEP:
                    self.check_held(pair)
                CALLS[name](self, pair, chance)
                for one in self.pairs:
                    self.check(one)
            except BaseException as error:
                error.args = (f"[{number} {name}] {error}", *error.args[1:])
                raise
        for pair in self.pairs:
            self.check_held(pair)
        for cache in self.caches:
            cache.close()
        del pair, self.pairs
        gc.collect()
        left = list(self.scratch.iterdir())
        assert not left, f"left behind: {left}"
        assert self.device is None or self.device.used_bytes == 0, f"{self.device.used_bytes} bytes stay on the device"

    def both(self, pair: Pair, act: Callable[[Any], Any]) -> None:
        """Do it with both caches. Raises AssertionError if results differ."""
        try:
            expected = act(pair.plain)
        except Exception as error:
            raise Impossible(f"{type(error).__name__}: {error}") from error
        same(act(pair.paged), expected, self.by_blocks)

    def check(self, pair: Pair) -> None:
        plain, paged = pair.plain, pair.paged
        assert paged.get_seq_length() == plain.get_seq_length(), (paged.get_seq_length(), plain.get_seq_length())
        for mine, its in zip(paged.layers, plain.layers, strict=True):
            assert mine.get_seq_length() == its.get_seq_length(), (mine.get_seq_length(), its.get_seq_length())
            assert mine.get_mask_sizes(3) == its.get_mask_sizes(3), (mine.get_mask_sizes(3), its.get_mask_sizes(3))
        if pair.length:
            paged._pages.owner.pager.check()

    def check_held(self, pair: Pair) -> None:
        for mine, its in pair.held:
            assert equal(mine, its), "a view that was held has other values"
        pair.held.clear()


def same(got: Any, expected: Any, about: bool) -> None:
    """Raises AssertionError if these are not the same: bit for bit, or only `about`."""
    if isinstance(expected, torch.Tensor):
        if about:
            torch.testing.assert_close(got, expected, rtol=NEAR, atol=NEAR, equal_nan=True)
        else:
            assert equal(got, expected), f"shapes {tuple(got.shape)} and {tuple(expected.shape)}: other values"
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            same(one, other, about)
    else:
        assert got == expected, (got, expected)


def tokens(batch: int, count: int, chance: random.Random) -> torch.Tensor:
    return torch.tensor([[chance.randrange(2, VOCABULARY) for _ in range(count)] for _ in range(batch)])


def forward(reading: Reading, pair: Pair, chance: random.Random) -> None:
    """Add some tokens, perhaps of entries that are padded on the left."""
    batch = pair.batch or chance.choice([1, 1, 2, 3])
    ids = tokens(batch, chance.choice([1, 1, 2, 5, 17, 60]), chance)
    options: dict[str, Any] = {}
    if chance.random() < 0.3 and not reading.by_blocks:  # queries that see nothing have any result
        mask = torch.ones(batch, pair.length + ids.shape[1], dtype=torch.long)
        mask[0, : chance.randrange(mask.shape[1])] = 0
        options["attention_mask"] = mask
    mode = chance.choice([torch.no_grad, torch.inference_mode])

    def act(cache: Any) -> torch.Tensor:
        with mode():
            model = reading.reference if cache is pair.plain else reading.model
            return model(ids, cache=cache, **options).logits.clone()

    before = copy.deepcopy(pair.plain)
    try:
        reading.both(pair, act)
    except BudgetError:
        pair.plain = before
        compare_keys(reading, pair)


def generate(reading: Reading, pair: Pair, chance: random.Random) -> None:
    """Go on by some tokens, after some that are given."""
    if reading.by_blocks:  # another last bit may choose another token
        return
    possible = [way for way in WAYS if way not in (SEVERAL_OF_EACH if pair.batch else ())]
    way = chance.choice([way for way in possible if way != "assisted" or pair.batch < 2])
    batch = pair.batch or (1 if way == "assisted" else chance.choice([1, 2]))
    ids = tokens(batch, pair.length + chance.choice([1, 3, 40]), chance)
    count, seed = chance.randint(1, 12), chance.randrange(1 << 20)

    def act(cache: Any) -> Any:
        torch.manual_seed(seed)
        found = reading.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            cache=cache,
            return_dict_in_generate=True,
            output_logits=True,
            **{"do_sample": False, **WAYS[way]},
        )
        return [found.sequences, list(found.logits)]

    reading.both(pair, act)


def crop(reading: Reading, pair: Pair, chance: random.Random) -> None:
    """Take the last tokens away."""
    count = chance.randint(0, min(pair.length, 20))
    if pair.length and all(can_crop(layer, count) for layer in pair.plain.layers):
        reading.both(pair, lambda cache: cache.crop(-count))


def can_crop(layer: Any, count: int) -> bool:
    """Return whether transformers can go on without the last `count` tokens of a layer."""
    length, window = layer.get_seq_length(), getattr(layer, "sliding_window", None)
    if window is None or length < window:
        return True
    return bool(layer.record_past and layer.keys.shape[-2] - count >= min(length - count, window - 1))


def keep_past(reading: Reading, pair: Pair, chance: random.Random) -> None:
    """Have windows keep what is before them, so that tokens can be taken away."""
    for cache in (pair.plain, pair.paged):
        for layer in cache.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()


def reorder(reading: Reading, pair: Pair, chance: random.Random) -> None:
    if not pair.length:
        return
    order = torch.tensor([chance.randrange(pair.batch) for _ in range(pair.batch)])
    reading.both(pair, lambda cache: cache.reorder_cache(order))


def repeat(reading: Reading, pair: Pair, chance: random.Random) -> None:
    if not pair.length:
        return
    times = chance.choice([1, 2, 3]) if pair.batch < 4 else 1
    reading.both(pair, lambda cache: cache.batch_repeat_interleave(times))


def pick(reading: Reading, pair: Pair, chance: random.Random) -> None:
    if not pair.length:
        return
    entries = torch.tensor([chance.randrange(pair.batch) for _ in range(chance.randint(1, pair.batch))])
    reading.both(pair, lambda cache: cache.batch_select_indices(entries))


def reset(reading: Reading, pair: Pair, chance: random.Random) -> None:
    reading.both(pair, lambda cache: cache.reset())


def read(reading: Reading, pair: Pair, chance: random.Random) -> None:
    """Compare all keys and values; views of some are held while tokens are added."""
    compare_keys(reading, pair)
    keys, window = pair.plain.layers[-1].keys, getattr(pair.plain.layers[-1], "sliding_window", None)
    stays = reading.device is None and not reading.by_blocks and window is None  # else other tokens take the place
    if chance.random() < 0.5 and stays and keys is not None:
        pair.held.append((pair.paged.layers[-1].keys[..., 1:, :], keys[..., 1:, :].clone()))


def compare_keys(reading: Reading, pair: Pair) -> None:
    for mine, its in zip(pair.paged.layers, pair.plain.layers, strict=True):
        for name in ("keys", "values"):
            theirs = getattr(its, name)
            if theirs is not None and theirs.numel():
                same(getattr(mine, name), theirs, reading.by_blocks)


def save(reading: Reading, pair: Pair, chance: random.Random) -> None:
    """Save, and go on from the file, in another cache or in several."""
    if not pair.length:
        return
    path = reading.directory / f"context{reading.files}"
    reading.files += chance.random() < 0.8  # else the next one is saved over it
    ids = tokens(pair.batch, pair.length, chance) if chance.random() < 0.5 else None
    pair.paged.save(path, tokens=ids)
    plain = copy.deepcopy(pair.plain)
    for layer in plain.layers:
        if hasattr(layer, "record_past"):  # which a file does not
            layer.record_past = False
            layer.keys, layer.values = (of[:, :, -layer.sliding_window + 1 :] for of in (layer.keys, layer.values))
    opened = Pair(plain, reading.make(lambda model, **given: KVCache.open(path, model, tokens=ids, **given)))
    if len(reading.pairs) < 3 and chance.random() < 0.6:
        reading.pairs.append(opened)
    else:
        reading.check_held(pair)
        pair.paged.close()
        reading.pairs[reading.pairs.index(pair)] = opened


CALLS: dict[str, Callable[[Reading, Pair, random.Random], None]] = {
    "forward": forward,
    "generate": generate,
    "crop": crop,
    "keep past": keep_past,
    "reorder": reorder,
    "repeat": repeat,
    "pick": pick,
    "reset": reset,
    "read": read,
    "save": save,
}
WEIGHTS = [6, 3, 3, 1, 2, 1, 1, 1, 3, 2]
KEEP = ("forward", "reset", "read", "save")
"""Calls that views of keys outlive."""


def draw(seed: str) -> Program:
    """Return the program of a seed."""
    chance = random.Random(seed)
    attention = chance.choice([None, None, None, "blocks"])
    names = ["forward", *chance.choices(list(CALLS), WEIGHTS, k=chance.randint(2, 9))]
    return {
        "seed": chance.randrange(1 << 30),
        "attention": attention,
        "config": chance.choice([name for name in KINDS if name != "latent" or not attention]),  # chooses experts
        "layers": chance.choice([1, 3, 7]),
        "dtype": "float32" if attention else chance.choice(["float32", "bfloat16"]),
        "device": chance.choice([None, None, *ORDERS]),
        "tokens": chance.choice([None, 16, 100]),
        "room": chance.choice([2 << 20, 2 << 20, 4 << 20, 16 << 20]),
        "calls": [[name, chance.randrange(1000)] for name in names],
    }


def run_case(program: Program, directory: Path) -> str | None:
    """Return what went wrong, None if nothing did; REFUSED and why, if swapper or what it is compared with cannot do it."""
    return outcome(lambda: Reading(program, directory).run(), (BudgetError, UnsupportedError))


def smaller(program: Program) -> Iterator[Program]:
    """Yield programs with a part less."""
    for number in range(len(program["calls"])):
        yield {**program, "calls": program["calls"][:number] + program["calls"][number + 1 :]}
    yield from ({**program, name: value} for name, value in PLAIN.items() if program[name] != value)


CACHES = Kind("caches", __doc__ or "", draw, run_case, smaller)


if __name__ == "__main__":
    sys.exit(run(CACHES, sys.argv[1:]))

"""A forward that runs parts of the model in other threads, and waits for them, is refused by name: it neither hangs nor lies."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import swapper

X = torch.arange(256.0).view(1, 256) / 256


def in_pool(parts, x):
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda part: part(x), parts))


def in_nested_pools(parts, x):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(in_pool, parts, x).result()


def in_pool_of_multiprocessing(parts, x):
    with ThreadPool(2) as pool:
        return pool.map(lambda part: part(x), parts)


def in_threads(parts, x):
    """As torch's DataParallel does."""
    found = {}

    def run(number, part):
        try:
            found[number] = part(x)
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = next((value for value in found.values() if isinstance(value, Exception)), None)
    if failed is not None:
        raise failed
    return [found[number] for number in range(len(parts))]


def in_asyncio(parts, x):
    async def run():
        return await asyncio.gather(*(asyncio.to_thread(part, x) for part in parts))

    return asyncio.run(run())


def one_after_the_other(parts, x):
    return [part(x) for part in parts]


WAYS = (in_pool, in_nested_pools, in_pool_of_multiprocessing, in_threads, in_asyncio)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(256, 256) for _ in range(2))
        self.head = nn.Linear(256, 256)
        self.way = one_after_the_other

    def forward(self, x):
        return self.head(sum(self.way(self.branches, x)))


def make():
    torch.manual_seed(0)
    return Branches()


def check(model, wanted, way):
    model.way = way
    with pytest.raises(
        swapper.errors.StateError, match=r"branches\.\d is run by thread .* Run branches\.\d in the thread"
    ):
        model(X)
    model.way = one_after_the_other
    assert torch.equal(model(X), wanted)  # nothing is left behind


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_training_forward_that_waits_for_its_parts_is_refused(tmp_path, way):
    wanted = make()(X)
    with swapper.SwapManager(tmp_path / "run", host_memory="8MiB") as manager:
        model = make()
        model, _ = manager.offload(model, torch.optim.SGD(model.parameters(), lr=0.1), params="nvme")
        check(model, wanted, way)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_loaded_model_s_forward_that_waits_for_its_parts_is_refused(tmp_path, way):
    reference, model = make(), make()
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    swapper.load(model, tmp_path / "model.safetensors", host_memory="4MiB")
    with torch.no_grad():
        check(model, reference(X), way)
    swapper.loaded(model).unload()

"""A default device of torch's, by `with torch.device(...)` or `torch.set_default_device`, changes nothing that swapper does.

`with torch.device("meta")` is the hardest one: memory there has no address.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from safetensors.torch import save_file

import swapper
from infer.small import TOKENS, make, on_meta

BUDGET = "4.5MiB"  # rows of embeddings and of the head are read one by one
PLACES = ("load", "forward", "state_dict", "read", "verify", "map", "unload")


@contextlib.contextmanager
def default_device(how):
    if how == "context":
        with torch.device("meta"):
            yield
        return
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("how", ["context", "set_default_device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_inference_is_that_without_a_default_device(tmp_path, place, dtype, how):

    def at(here):
        return default_device(how) if here == place else contextlib.nullcontext()

    reference, model = make(dtype), on_meta()
    save_file({name: value.float() for name, value in reference.state_dict().items()}, tmp_path / "m.safetensors")
    with at("load"):
        swapper.load(model, tmp_path / "m.safetensors", host_memory=BUDGET, dtype=dtype)
    with torch.no_grad():
        wanted = reference(TOKENS)
        for _ in range(2):
            with at("forward"):
                assert torch.equal(model(TOKENS), wanted)
        with at("map"):
            assert all(torch.equal(output, wanted) for output in swapper.loaded(model).map(model, [TOKENS, TOKENS]))
        with at("read"):
            assert torch.equal(model.head.weight + 0, reference.head.weight)
    with at("state_dict"):
        state = model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in reference.state_dict().items())
    with at("verify"):
        swapper.loaded(model).verify()
    with at("unload"):
        swapper.loaded(model).unload()


@pytest.mark.parametrize("how", ["context", "set_default_device"])
def test_checkpoints_are_those_without_a_default_device(tmp_path, how):
    state = make().state_dict()
    with default_device(how):
        swapper.checkpoint.save(state, tmp_path / "saved.pt")
        loaded = swapper.checkpoint.load(tmp_path / "saved.pt")
        mapped = swapper.checkpoint.load(tmp_path / "saved.pt", mmap=True)
    for name, value in state.items():
        assert torch.equal(value, loaded[name]) and torch.equal(value, mapped[name])

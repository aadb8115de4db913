"""The small model in memory, and its checkpoint; devices of copies that come late, and models that are unloaded at the end."""

from __future__ import annotations

import pytest

import swapper
from infer.host_device import ORDERS, HostDevice
from infer.small import make


@pytest.fixture
def reference():
    return make()


def save_file(*arguments, **options):
    from safetensors.torch import save_file as save  # here: tools/gpu_check runs some of these tests without it

    save(*arguments, **options)


@pytest.fixture
def path(tmp_path, reference):
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def saved(tmp_path):
    def save(model, metadata=None):
        save_file(model.state_dict(), tmp_path / "model.safetensors", metadata=metadata)
        return tmp_path / "model.safetensors"

    return save


@pytest.fixture(params=ORDERS[1:3])
def device(request):
    return HostDevice(request.param)


@pytest.fixture
def opened():
    models = []
    yield models
    for model in models:
        if "_swapper_loaded" in model.__dict__:
            swapper.loaded(model).unload()


@pytest.fixture
def small(tmp_path):
    """Options of a KVCache that has less memory than the keys and values of most tests."""
    return {"host_memory": "2MiB", "directory": tmp_path}

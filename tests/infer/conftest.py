"""The small model in memory, and its checkpoint."""

from __future__ import annotations

import pytest
from safetensors.torch import save_file

from infer.small import make


@pytest.fixture
def reference():
    return make()


@pytest.fixture
def path(tmp_path, reference):
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"

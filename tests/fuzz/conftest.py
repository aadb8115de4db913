"""Prepares processes whose children run cases."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator

import pytest

from fuzz import cases


@pytest.fixture
def prepared() -> Iterator[None]:
    """This process as `cases.run` prepares it, and as it was before."""
    with warnings.catch_warnings():
        cases.prepare()
        yield
    logging.disable(logging.NOTSET)

"""Makes processes that csrc/tests/python_sanitized starts import the data plane that was built with ASan."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from types import ModuleType

NAME = "swapper._C"


class Sanitized(MetaPathFinder):
    """Finds the data plane named by the environment, before the installed one is found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != NAME:
            return None
        place = os.environ["SWAPPER_SANITIZED"]
        return importlib.util.spec_from_file_location(NAME, place, loader=ExtensionFileLoader(NAME, place))


sys.meta_path.insert(0, Sanitized())

"""Installs swapper when a program imports deepspeed; Python runs this at its start.

`python -m swapper.integrations.deepspeed` puts this folder into PYTHONPATH. It imports nothing of swapper or DeepSpeed
itself.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from typing import Any


class _AfterDeepSpeed(importlib.abc.MetaPathFinder):
    """Finds deepspeed as usual, and installs swapper after its `__init__` has run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "deepspeed":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def exec_module(module: object) -> None:
                run(module)
                from swapper.integrations.deepspeed import install

                install()

            loader.exec_module = exec_module
        return spec


def _run_the_next_one() -> None:
    """Run a sitecustomize that this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib would slow every start
    others = [place for place in sys.path if os.path.abspath(place) != here]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("SWAPPER_DEEPSPEED"):
    sys.meta_path.insert(0, _AfterDeepSpeed())
_run_the_next_one()

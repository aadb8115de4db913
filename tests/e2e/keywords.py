"""Options as tables of tests have them, flat, in the form that swapper's face takes: the rare ones in objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import swapper


def for_offload(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `update_on`, `update_with` and `stochastic_rounding` as an Accelerator, and the others as they are."""
    return _grouped(options, "accelerator", swapper.Accelerator, {n: n for n in vars(swapper.Accelerator())})


def for_manager(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `commit_every`, `crash_resume` and `fsync` as a CommitPolicy, and the others as they are."""
    return _grouped(
        options,
        "commits",
        swapper.CommitPolicy,
        {"commit_every": "every", "crash_resume": "crash_resume", "fsync": "fsync"},
    )


def _grouped(options: Mapping[str, Any], name: str, make: Any, names: Mapping[str, str]) -> dict[str, Any]:
    grouped = {theirs: options[ours] for ours, theirs in names.items() if ours in options}
    others = {key: value for key, value in options.items() if key not in names}
    return {**others, name: make(**grouped)} if grouped else others

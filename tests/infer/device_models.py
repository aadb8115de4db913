"""Shared by the tests of models on a device: loading one within two budgets, running it, and looking at its frames."""

from __future__ import annotations

import torch

import swapper
from infer.small import TOKENS, on_meta

MIB = 1 << 20
HOST = 3 * MIB


def load(path, device, opened, host=HOST, budget=4 * MIB, dtype=torch.float32, **options):
    model = swapper.load(on_meta(dtype=dtype), path, host_memory=host, device=device, device_memory=budget, **options)
    opened.append(model)
    return model


def run(model, tokens=TOKENS):
    with torch.no_grad():
        return model(tokens)


def check(model):
    """Frames are conserved; none is leased for a copy that is over."""
    loaded = swapper.loaded(model)
    if loaded._hooks is not None and loaded._on_device is not None:
        loaded._on_device.tier.finish()
        loaded._streaming.pager.check()
        kept = {page for group in loaded._groups for access in group.home.kept_accesses for page in access.pages}
        leased = {p.index for s in loaded._streaming.sections for section in s for p in section.pages if p.leases}
        assert leased == kept

"""Has pytest's process, or any other that imports this, run torch's CUDA build on the stand-in: see tools/test_cuda."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

torch.ops.load_library(Path(sys.prefix) / "stand_in" / "kernels.so")
torch.backends.cudnn.enabled = False  # its libraries launch kernels of their own
for kind in ("flash", "mem_efficient", "cudnn"):
    getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)

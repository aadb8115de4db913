"""Saves a model and its optimizer, loads them again, and exports the model. Nothing is paged here.

    python examples/save_load.py --directory /nvme

The files are plain: torch.load and safetensors open them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

import swapper


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(), help="on a drive (default: here)")
    parser.add_argument("--width", type=int, default=2048)
    options = parser.parse_args()

    model = torch.nn.Sequential(*(torch.nn.Linear(options.width, options.width) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(4, options.width)).square().mean().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}

    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        path = Path(directory) / "step-1.pt"
        start = time.monotonic()
        swapper.checkpoint.save(state, path)
        saved = time.monotonic()
        loaded = swapper.checkpoint.load(path, verify=True)
        print(f"{path.stat().st_size / 1e6:.0f} MB: saved in {saved - start:.2f} s, ", end="")
        print(f"loaded and verified in {time.monotonic() - saved:.2f} s")
        assert all(torch.equal(loaded["model"][name], tensor) for name, tensor in model.state_dict().items())
        assert torch.load(path, mmap=True)["step"] == 1  # plain torch reads it

        swapper.checkpoint.export(path, Path(directory) / "model.safetensors", "safetensors")
        print(f"the model alone, as safetensors: {(Path(directory) / 'model.safetensors').stat().st_size / 1e6:.0f} MB")
    print("Every tensor came back with its bits, torch.load opened the same file, and the files are removed again.")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("Interrupted. Nothing is left behind.") from None

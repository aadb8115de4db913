"""One-byte corruptions of a snapshot, as a program: each is made, must be found by `swapper verify`'s own function, and is undone.

Usage: corrupted.py DIRECTORY SEED COUNT. The byte is anywhere in the file: payload, headers, padding, tail, the very end.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

from e2e import killed_run
from swapper.durability.verify import Fault, verify


def make_snapshot(directory: Path) -> Path:
    import swapper

    model, optimizer, scheduler = killed_run.make()
    with swapper.SwapManager(directory, host_memory=killed_run.BUDGET) as manager:
        model, optimizer = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
        manager.register(scheduler=scheduler)
        killed_run.train_step(model, optimizer, scheduler, 0)
        ticket = manager.snapshot(directory / "whole.pt", extra={"note": "of a test"})
    return ticket.path


def corrupt(path: Path, offset: int, flip: int) -> list[Fault]:
    """Return what is found with the byte at `offset` changed; the file is as it was afterwards."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        try:
            file.seek(offset)
            file.write(bytes([byte ^ flip]))
            file.flush()
            return verify(path)[0].faults
        finally:
            file.seek(offset)
            file.write(bytes([byte]))


def main(directory: Path, seed: int, count: int) -> None:
    path = make_snapshot(directory)
    path.chmod(0o600)
    assert verify(path)[0].faults == []
    chance = random.Random(seed)
    nbytes = path.stat().st_size
    found: Counter[str] = Counter()
    for _ in range(count):
        offset = (
            chance.randrange(nbytes) if chance.random() < 0.5 else nbytes - 1 - chance.randrange(min(nbytes, 20_000))
        )
        faults = corrupt(path, offset, 1 << chance.randrange(8))
        assert faults, f"a change of the byte at {offset} of {nbytes} was not found"
        # The end of the file stands for all where the seal itself is damaged.
        assert any(f.offset <= offset < f.offset + f.nbytes for f in faults), (offset, faults)
        found["of a tensor" if faults[0].tensors else "elsewhere"] += 1
    assert verify(path)[0].faults == []
    print(f"{count} corruptions, all found: {found['of a tensor']} in tensors, {found['elsewhere']} elsewhere")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

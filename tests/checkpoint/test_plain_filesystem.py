"""Runs, snapshots, saves and exports on a filesystem without hard links, nameless files and holes, as FAT or a share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.models import Net, train_step
from e2e.twins import assert_same

import swapper
from swapper.checkpoint import export, load, save, verify

PLAIN = """
import os, sys
import mfusepy as fuse
class Plain(fuse.Operations):
    use_ns = True
    def at(self, path): return sys.argv[1] + path
    def getattr(self, path, fh=None):
        of = os.lstat(self.at(path))
        times = {f"st_{kind}time": getattr(of, f"st_{kind}time_ns") for kind in "amc"}
        kept = ("mode", "nlink", "uid", "gid", "size", "blocks")
        return {**times, **{f"st_{name}": getattr(of, f"st_{name}") for name in kept}}
    def readdir(self, path, fh): return [".", "..", *os.listdir(self.at(path))]
    def create(self, path, mode, fi=None): return os.open(self.at(path), os.O_RDWR | os.O_CREAT, mode)
    def open(self, path, flags): return os.open(self.at(path), os.O_RDWR)
    def read(self, path, size, offset, fh): return os.pread(fh, size, offset)
    def write(self, path, data, offset, fh): return os.pwrite(fh, data, offset)
    def truncate(self, path, length, fh=None): os.truncate(self.at(path), length)
    def unlink(self, path): os.unlink(self.at(path))
    def mkdir(self, path, mode): os.mkdir(self.at(path), mode)
    def rmdir(self, path): os.rmdir(self.at(path))
    def rename(self, old, new, *flags): os.rename(self.at(old), self.at(new))
    def chmod(self, path, mode): os.chmod(self.at(path), mode)
    def statfs(self, path):
        of = os.statvfs(self.at(path))
        return {name: getattr(of, name) for name in dir(of) if name.startswith("f_") and name != "f_fsid"}
    def flush(self, path, fh): return 0
    def fsync(self, path, datasync, fh): os.fsync(fh)
    def release(self, path, fh): os.close(fh)
fuse.FUSE(Plain(), sys.argv[2], foreground=True, nothreads=True)
"""


@pytest.fixture
def plain(mount_fuse: Callable[..., Path], tmp_path: Path) -> Path:
    (tmp_path / "below").mkdir()
    return mount_fuse(PLAIN, tmp_path / "below")


def test_a_run_and_its_snapshots_are_exact_where_files_cannot_share_their_bytes(plain: Path, tmp_path: Path) -> None:
    def next_step(model: Any, optimizer: Any, step: int) -> None:
        torch.manual_seed(step)
        train_step(model, optimizer)

    torch.manual_seed(0)
    twin = Net()
    theirs = torch.optim.AdamW(twin.parameters())
    places = [(plain / "run", plain / "a.pt"), (plain / "run", tmp_path / "b.pt"), (tmp_path / "run", plain / "c.pt")]
    for step, (directory, path) in enumerate(places):
        torch.manual_seed(0)
        model = Net()
        with swapper.SwapManager(directory, host_memory="16MiB", resume="auto") as manager:
            optimizer = torch.optim.AdamW(model.parameters())
            model, optimizer = manager.offload(model, optimizer, params="nvme", optimizer_state="nvme")
            next_step(model, optimizer, step)
            manager.snapshot(path).wait()
            with pytest.raises(swapper.CheckpointError, match="exists already"):
                manager.snapshot(path)
        if directory == plain / "run":
            next_step(twin, theirs, step)
            assert_same(torch.load(path, weights_only=True)["model"], twin.state_dict())
        assert not any(report.faults for of in (path, directory) for report in verify(of))
    assert {path.name for path in plain.iterdir()} == {"run", "a.pt", "c.pt"}, "nothing is left behind"


def test_files_appear_there_whole_and_replace_only_what_they_may(plain: Path) -> None:
    state = {"w": torch.randn(300, 300)}
    save(state, plain / "x.pt", overwrite=False)
    with pytest.raises(swapper.CheckpointError, match="exists already"):
        save(state, plain / "x.pt", overwrite=False)
    assert_same(load(plain / "x.pt"), state)
    export(plain / "x.pt", plain / "y.safetensors", "safetensors")
    export(plain / "x.pt", plain / "dcp", "dcp")
    export(plain / "dcp", plain / "z.pt", "torch")
    assert_same(dict(torch.load(plain / "z.pt", weights_only=True)), state)
    assert {path.name for path in plain.iterdir()} == {"x.pt", "y.safetensors", "dcp", "z.pt"}, "nothing is left behind"

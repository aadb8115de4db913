"""A file that becomes shorter beneath tensors that show it never ends the process, and what torch writes onto it is whole."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import subprocess
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import save as save_by_name

import swapper
from infer.small import make, on_meta

BUDGET = "4.5MiB"  # most weights are read in each pass


def by_truncate(path, state):
    os.truncate(path, 0)


def by_leaving_a_page(path, state):
    os.truncate(path, 4096)


def by_shell(path, state):
    subprocess.run(["sh", "-c", f"> {path}"], check=True)


def by_cp(path, state):
    (path.parent / "short").write_bytes(b"x" * 100)
    subprocess.run(["cp", path.parent / "short", path], check=True)


def by_unlink(path, state):
    path.unlink()


def by_rename(path, state):
    (path.parent / "short").write_bytes(b"x" * 100)
    (path.parent / "short").replace(path)


def by_open(path, state):
    with path.open("wb") as file, pytest.raises(swapper.errors.CheckpointError, match="was truncated to"):
        torch.save(state, file)  # past the guard of torch.save's: the file is empty before


def by_growing_again(path, state):
    nbytes = path.stat().st_size
    os.truncate(path, 0)
    os.truncate(path, nbytes)


SHRINKS = (by_truncate, by_leaving_a_page, by_shell, by_cp, by_open, by_growing_again)
CHANGED = "was truncated to|was written to"
LEAVES_THE_BYTES = (by_unlink, by_rename)


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("shorten", SHRINKS, ids=lambda way: way.__name__)
def test_a_file_that_became_shorter_is_named(tmp_path, shorten, suffix):
    path = tmp_path / f"model.{suffix}"
    reference, model = make(), on_meta()
    (save_file if suffix == "safetensors" else torch.save)(reference.state_dict(), path)
    swapper.load(model, path, host_memory=BUDGET)
    state = model.state_dict()
    view = state["head.weight"][:3].t()
    kept = model.head.weight[:3]
    array, values = state["head.weight"].numpy(), reference.head.weight.detach().numpy()
    shorten(path, state)
    for act in (
        lambda: state["head.weight"].sum(),
        lambda: view.clone(),
        lambda: torch.stack([view]),
        lambda: repr(view),
    ):
        with pytest.raises(swapper.errors.CheckpointError, match=CHANGED):
            act()
    with pytest.raises(swapper.errors.CheckpointError, match="was changed"):
        kept.sum()
    assert (array == values).all()
    for act in (lambda: model.state_dict(), lambda: model.head.weight.sum(), lambda: swapper.loaded(model).verify()):
        with pytest.raises(swapper.errors.SwapperError):
            act()
    assert state["head.weight"].shape == reference.head.weight.shape
    swapper.loaded(model).unload()


@pytest.mark.parametrize("replace", LEAVES_THE_BYTES, ids=lambda way: way.__name__)
def test_a_file_that_is_replaced_as_a_whole_keeps_its_bytes_for_state_dict(tmp_path, replace):
    path = tmp_path / "model.safetensors"
    reference, model = make(), on_meta()
    save_file(reference.state_dict(), path)
    swapper.load(model, path, host_memory=BUDGET)
    state = model.state_dict()
    replace(path, state)
    assert all(torch.equal(value, state[name]) for name, value in reference.state_dict().items())
    swapper.loaded(model).unload()


def test_what_torch_writes_of_state_dict_is_plain(tmp_path):
    path = tmp_path / "model.pt"
    reference, model = make(), on_meta()
    torch.save(reference.state_dict(), path)
    swapper.load(model, path, host_memory=BUDGET)
    state = model.state_dict()
    torch.save(state, tmp_path / "plain.pt")
    save_file(state, tmp_path / "plain.safetensors")
    swapper.checkpoint.save(state, path, overwrite=True)
    for saved in (torch.load(tmp_path / "plain.pt", weights_only=True), torch.load(path, weights_only=True)):
        assert all(
            type(saved[name]) is torch.Tensor and torch.equal(saved[name], v)
            for name, v in reference.state_dict().items()
        )
    other = make()
    other.load_state_dict(state, assign=True)
    assert torch.equal(other.head.weight, reference.head.weight)
    swapper.loaded(model).unload()


# --- functions that write files ---------------------------------------------------------------------------------------


def old_torch_save(state, path):
    torch.save(state, path, _use_new_zipfile_serialization=False)


def dcp_save(state, path):
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=path)


def dcp_load(path):
    state = {name: torch.zeros_like(value) for name, value in make().state_dict().items()}
    with warnings.catch_warnings(action="ignore"):
        dcp.load(state, checkpoint_id=path)
    return state


WRITERS = {
    "torch.save": (torch.save, torch.load),
    "by name": (save_by_name, torch.load),
    "of a text": (lambda state, path: torch.save(state, str(path)), torch.load),
    "old format": (old_torch_save, torch.load),
    "safetensors": (save_file, load_file),
    "dcp": (dcp_save, dcp_load),
    "swapper": (lambda state, path: swapper.checkpoint.save(state, path, overwrite=True), torch.load),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_what_is_written_onto_the_loaded_file_is_whole(tmp_path, writer):
    """It is what would be written elsewhere, by each of the file's names; the model says that its file is another one."""
    write, read = WRITERS[writer]
    path, link, plain = tmp_path / "loaded" / "model.file", tmp_path / "loaded" / "link", tmp_path / "link"
    path.parent.mkdir()
    reference = make()
    (torch.save if read is torch.load else write)(reference.state_dict(), path)
    model = on_meta()
    swapper.load(model, path, host_memory="8MiB")
    before = model.state_dict()
    link.symlink_to(path)
    path.chmod(0o750)
    write(model.state_dict(), link)
    assert path.stat().st_mode & 0o777 == 0o750
    assert {entry.name for entry in path.parent.iterdir()} == {"model.file", "link"}
    if read is torch.load and writer != "old format":  # which has addresses in it
        write(reference.state_dict(), plain)
        assert path.read_bytes() == plain.read_bytes()
    found = read(path)
    for name, value in reference.state_dict().items():
        assert torch.equal(found[name], value) and torch.equal(before[name], value)
    with pytest.raises(swapper.errors.CheckpointError, match="was changed"), torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.long))
    swapper.loaded(model).unload()


@pytest.mark.parametrize("write", [torch.save, old_torch_save], ids=["torch.save", "old format"])
def test_what_is_written_onto_a_file_that_checkpoint_load_has_mapped_is_whole(tmp_path, write):
    path, expected = tmp_path / "model.pt", make().state_dict()
    torch.save(expected, path)
    mapped = swapper.checkpoint.load(path, mmap=True)
    write(mapped, path)
    found = torch.load(path)
    assert all(torch.equal(found[name], value) and torch.equal(mapped[name], value) for name, value in expected.items())


def test_a_write_that_fails_leaves_the_loaded_file_as_it_was(tmp_path):
    path = tmp_path / "model.pt"
    torch.save(make().state_dict(), path)
    before, model = path.read_bytes(), on_meta()
    swapper.load(model, path, host_memory="8MiB")
    with pytest.raises(AttributeError, match="pickle"):
        torch.save({**model.state_dict(), "a function": lambda: None}, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    swapper.loaded(model).unload()


# --- while it is read -------------------------------------------------------------------------------------------------


class Shortens:
    """Shortens a file when it is pickled: torch.save writes the bytes of tensors after that."""

    def __init__(self, shorten, path):
        self.shorten, self.path = shorten, path

    def __reduce__(self):
        self.shorten(self.path, None)
        return str, ()


@pytest.fixture
def loaded_file(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(make().state_dict(), path)
    model = on_meta()
    swapper.load(model, path, host_memory=BUDGET)
    yield path, model
    swapper.loaded(model).unload()


def save_into_an_open_file(state, path):
    with path.open("wb") as file:
        torch.save(state, file)


SAVES = {
    "torch.save": torch.save,
    "old format": old_torch_save,
    "open file": save_into_an_open_file,
    "memory": lambda state, path: torch.save(state, io.BytesIO()),
    "old format in memory": lambda state, path: torch.save(state, io.BytesIO(), _use_new_zipfile_serialization=False),
    "swapper": swapper.checkpoint.save,
}


@pytest.mark.parametrize("shorten", [by_leaving_a_page, by_growing_again], ids=lambda way: way.__name__)
@pytest.mark.parametrize("way", SAVES)
def test_what_is_written_while_the_file_becomes_shorter_is_refused(loaded_file, way, shorten):
    """Also if another file had the same path before, is mapped still, and was changed then."""
    path, model = loaded_file
    older = model.state_dict()
    by_leaving_a_page(path, older)
    path.unlink()
    save_file(make().state_dict(), path)
    newer = on_meta()
    swapper.load(newer, path, host_memory=BUDGET)
    with pytest.raises(swapper.errors.CheckpointError, match=f"{path} was .* which is not whole"):
        SAVES[way]({**newer.state_dict(), "last": Shortens(shorten, path)}, path.parent / "new.pt")
    swapper.loaded(newer).unload()
    assert older.keys() == newer.state_dict().keys()


def test_what_is_written_onto_a_file_that_becomes_shorter_meanwhile_is_refused(loaded_file):
    path, model = loaded_file
    with pytest.raises(swapper.errors.CheckpointError, match="which is not whole"):
        torch.save({**model.state_dict(), "last": Shortens(by_leaving_a_page, path)}, path)


def test_memory_past_the_end_is_zeros_for_code_that_has_its_address_and_an_error_for_all_else(loaded_file):
    path, model = loaded_file
    weight = model.state_dict()["head.weight"]
    with torch._C.DisableTorchFunctionSubclass():
        address = weight.data_ptr()
    nbytes = path.stat().st_size
    os.truncate(path, 0)
    assert not any(ctypes.string_at(address, weight.nbytes))
    with path.open("ab") as file:
        file.write(b"1" * nbytes)
    with pytest.raises(swapper.errors.CheckpointError, match=CHANGED):
        weight.sum()


def test_a_read_at_whose_end_the_file_is_shorter_is_an_error(tmp_path):
    """A thread truncates the file at any moment of reads: each gives the sum of all values, or an error."""
    path = tmp_path / "model.safetensors"
    values = torch.ones(1 << 22)
    for _ in range(8):
        save_file({"weight": values}, path)
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.empty(1 << 22, device="meta"))
        swapper.load(model, path, host_memory="24MiB")
        weight, started = model.state_dict()["weight"], threading.Event()

        def truncate(started=started):
            started.wait()
            os.truncate(path, 4096)

        thread = threading.Thread(target=truncate)
        thread.start()
        with pytest.raises(swapper.errors.CheckpointError, match=CHANGED):
            while True:
                started.set()
                assert weight.sum() == 1 << 22
        thread.join()
        swapper.loaded(model).unload()


def test_each_thread_takes_the_signals_that_its_own_instructions_cause(loaded_file):
    """A thread that blocks them ends the process, whatever the handler does, when it copies from a shorter file."""
    path, model = loaded_file
    swapper.checkpoint.save(model.state_dict(), path.parent / "copy.pt")
    found = [status_of(task) for task in Path("/proc/self/task").iterdir()]
    masks = [(task["Name"].strip(), task["SigBlk"]) for task in found if task["Name"].strip().startswith("swapper")]
    assert masks
    for number in (signal.SIGBUS, signal.SIGSEGV, signal.SIGFPE, signal.SIGILL):
        assert not [name for name, mask in masks if int(mask, 16) >> (number - 1) & 1]


def status_of(task):
    return dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())

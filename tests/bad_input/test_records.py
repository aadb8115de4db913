"""Records and side files of a run that somebody changed: refused by an error of ours, or harmless; nothing else is touched."""

from __future__ import annotations

import copy
import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.models import Net, train_step
from e2e.twins import adamw
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling import examples

import swapper
from swapper.durability import commit
from swapper.durability.commit import encode_commit, publish_commit, read_commit
from swapper.durability.directory import COMMIT_NAME, FALLBACK_NAME, RETENTION_NAME
from swapper.durability.verify import verify
from swapper.io.drives import RECORD_NAME, DrivesRecord, read_record
from swapper.runtime import records

BUDGET = "32MiB"

ODD: list[Any] = [
    None, True, -1, 0, 1, 3.5, float("nan"), 1 << 40, -(1 << 70), "", "x", "x" * 300, "../victims/file", "/etc/passwd", ".", "a\0b",
    [], [None], [[[]]], {}, {"a": 1}, {1: 2}, {-1: "../../victims/file"}, torch.zeros(2), torch.zeros(0, dtype=torch.int32),
]  # fmt: skip


def train(directories: list[Path], steps: int = 1) -> list[torch.Tensor]:
    model = Net(depth=1)
    torch.manual_seed(1)
    with swapper.SwapManager(directories, host_memory=BUDGET, resume="auto") as manager:
        model, optimizer = manager.offload(model, adamw(model.parameters()), params="nvme", optimizer_state="nvme")
        for _ in range(steps):
            train_step(model, optimizer)
        with manager.gather(model):
            return [p.detach().clone() for p in model.parameters()]


class Victims:
    """A run over two drives, to be put back as it was; and files beside it, which nobody may touch."""

    def __init__(self, scratch: Path) -> None:
        self.drives = [scratch / f"drive-{n}" for n in range(2)]
        self._kept = scratch / "kept"
        self.outside = scratch / "victims"
        for path in (*self.drives, self.outside):
            path.mkdir()
        (self.outside / "file").write_bytes(bytes(1 << 20))
        train(self.drives, steps=2)
        (scratch / "snapshots").mkdir()
        for drive in self.drives:
            shutil.copytree(drive, self._kept / drive.name)
        self.run = self.drives[0] / "rank-0-of-1"
        self.expected = train(self.drives)
        self.put_back()
        self._before = self._look()
        record = read_commit(self.run)
        assert record is not None
        self.record = record

    def _look(self) -> list[tuple[str, int, int]]:
        return [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(self.outside.rglob("*"))]

    def put_back(self) -> None:
        for drive in self.drives:
            shutil.rmtree(drive)
            shutil.copytree(self._kept / drive.name, drive)

    def check(self) -> None:
        """Go on with the run, and look what comes of it."""
        for use in (lambda: verify(self.run), lambda: train(self.drives)):
            try:
                found = use()
            except swapper.SwapperError:
                continue
            if isinstance(found[0], torch.Tensor):
                assert all(torch.equal(a, b) for a, b in zip(found, self.expected, strict=True))
        assert self._look() == self._before
        self.put_back()


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victims]:
    yield Victims(tmp_path_factory.mktemp("records"))


FIELDS = [
    "step", "rank", "world_size", "boot_id", "optimizer", "placement", "plans", "files", "sections", "param_groups", "state_entries",  # noqa: E501
    "registered", "extra", "rng", "external", "edits", "job",
]  # fmt: skip


def republish(victims: Victims, change: Callable[[dict[str, Any]], object]) -> None:
    """Publish the commit with other content, and a seal that fits."""

    class Tail(commit.PreparedTail):
        def __init__(self, layout: Any, content: Any, locate: Any) -> None:
            content = copy.deepcopy(content)
            change(content)
            super().__init__(layout, content, locate)

    original, commit.PreparedTail = commit.PreparedTail, Tail
    try:
        data = encode_commit(victims.record)
    finally:
        commit.PreparedTail = original
    publish_commit(victims.run, data, False)


@pytest.mark.parametrize("field", FIELDS)
def test_a_commit_of_any_other_content_is_refused_or_harmless(field: str, victims: Victims) -> None:
    for odd in ODD:
        republish(victims, lambda content, odd=odd: content.update({field: odd}))
        try:
            read = read_commit(victims.run)
        except swapper.CheckpointError as error:
            assert str(victims.run) in str(error)
        else:
            assert read is not None
            if field not in ("registered", "extra", "rng", "boot_id", "job", "edits", "step", "external"):
                victims.check()
    victims.put_back()


@pytest.mark.parametrize("inner", ["nbytes", "piece_bytes", "counts", "files", "crc32s"])
def test_sections_of_any_other_content_are_refused(inner: str, victims: Victims) -> None:
    for odd in [*ODD, torch.full((3,), 7, dtype=torch.int32), torch.full((3,), 1 << 40)]:
        republish(victims, lambda content, odd=odd: content["sections"].update({inner: odd}))
        with pytest.raises(swapper.CheckpointError, match="cannot be read"):
            read_commit(victims.run)
    victims.put_back()


@pytest.mark.whole
@pytest.mark.parametrize(
    "name",
    [
        "../victims/file",
        "/etc/passwd",
        "..",
        ".",
        "",
        "a/b.swap",
        "../x.swap",
        "x" * 300 + ".swap",
        "commit.pt",
        "lock",
        "a\0.swap",
    ],
)
def test_a_commit_names_plain_swap_files_only(name: str, victims: Victims) -> None:
    republish(victims, lambda content: content["files"].update({max(content["files"]): name}))
    with pytest.raises(swapper.CheckpointError, match=r"files.*not (a path|the plain name|the name of a swap file)"):
        train(victims.drives)
    victims.check()


@pytest.mark.whole
@pytest.mark.parametrize("missing", FIELDS)
def test_a_commit_without_a_field_is_refused(missing: str, victims: Victims) -> None:
    republish(victims, lambda content: content.pop(missing))
    if missing in ("edits", "job"):  # which older ones do not have
        assert read_commit(victims.run) is not None
    else:
        with pytest.raises(swapper.CheckpointError, match=f"{missing} is missing"):
            read_commit(victims.run)
    victims.put_back()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(["format", "run", "index", "directories", "weights", "published", "crc32", "x"])
DATA = st.binary(max_size=200) | JSON.map(lambda content: records.seal({"a": content})[:-1])


@given(content=st.dictionaries(KEYS, JSON, max_size=6) | DATA | st.just(b"[" * 100_000) | st.just(b'{"a":' * 100_000))
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_record_of_drives_is_what_was_written_or_an_error(content: Any, tmp_path: Path) -> None:
    path = tmp_path / RECORD_NAME
    path.write_bytes(content if isinstance(content, bytes) else records.seal(content))
    with pytest.raises(swapper.DirectoryError, match=r"drives\.json"):
        read_record(tmp_path)


@pytest.mark.whole
@pytest.mark.parametrize("key", ["format", "run", "index", "directories", "weights"])
def test_no_other_value_in_a_record_of_drives_is_believed(key: str, victims: Victims) -> None:
    for odd in [odd for odd in ODD if not isinstance(odd, torch.Tensor)]:
        data = (victims.run / RECORD_NAME).read_bytes()
        content = records.unseal(data, records.anything)
        (victims.run / RECORD_NAME).write_bytes(records.seal({**content, key: odd}))
        try:
            found = read_record(victims.run)
        except swapper.DirectoryError:
            (victims.run / RECORD_NAME).write_bytes(data)
        else:
            assert isinstance(found, DrivesRecord)
            assert key in ("run", "index") or odd == content[key]
            victims.check()


@pytest.mark.parametrize(
    "content", ["", "[]", "[[1]]", '[["a", 1, 2]]', "[" * 100_000, '{"published": [[1, 2, 3, 4]]}', "{}"]
)
def test_a_list_of_snapshots_that_is_none_costs_nothing(content: str, victims: Victims) -> None:
    for data in (content.encode(), records.seal({"published": content})):
        (victims.run / RETENTION_NAME).write_bytes(data)
        victims.check()


@pytest.mark.whole
@pytest.mark.parametrize("name", [COMMIT_NAME, FALLBACK_NAME, RECORD_NAME, RETENTION_NAME, "lock", "turn-0.swap"])
@pytest.mark.parametrize("kind", ["fifo", "directory", "link to itself"])
def test_what_is_no_file_is_no_record(name: str, kind: str, victims: Victims) -> None:
    path = victims.run / name
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(path)
    victims.check()


def test_a_record_is_what_it_was(victims: Victims) -> None:
    record = read_commit(victims.run)
    assert record is not None
    publish_commit(victims.run, encode_commit(dataclasses.replace(record)), False)
    assert read_commit(victims.run) == record
    assert all(torch.equal(a, b) for a, b in zip(train(victims.drives), victims.expected, strict=True))
    victims.put_back()

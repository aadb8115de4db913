"""Files over several directories: what goes out comes back, from any offset, by the layout that the file was made with."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from e2e.leaks import live_threads
from handle_bytes import noise, raw

from swapper import AioHandle, ConfigError, IoError

STRIPE = 64 << 10


@pytest.fixture
def directories(tmp_path: Path) -> list[Path]:
    made = [tmp_path / name for name in ("one", "two", "three")]
    for directory in made:
        directory.mkdir()
    return made


def striped(directories: list[Path], **options: object) -> AioHandle:
    return AioHandle(block_size=16 << 10, directories=directories, stripe_bytes=STRIPE, **options)  # type: ignore[arg-type]


@pytest.mark.whole
@pytest.mark.parametrize("backend", ["uring", "aio", "threads"])
@pytest.mark.parametrize("nbytes", [0, 1, 5000, STRIPE, 3 * STRIPE, 20 * STRIPE + 777])
def test_what_was_written_is_read(directories: list[Path], nbytes: int, backend: str) -> None:
    tensor, back = noise(nbytes), torch.zeros(nbytes, dtype=torch.uint8)
    with striped(directories, backend=backend) as handle:
        assert handle.sync_pwrite(tensor, "x.bin") == 1
        assert handle.sync_pread(back, "x.bin") == 1
        with pytest.raises(IoError, match="are needed"):
            handle.sync_pread(noise(nbytes + 1), "x.bin")
    assert torch.equal(tensor, back)
    sizes = [(directory / f"x.bin.stripe{n}of3").stat().st_size for n, directory in enumerate(directories)]
    assert sum(sizes) == nbytes


def test_stripes_lie_where_they_should(directories: list[Path]) -> None:
    tensor = noise(6 * STRIPE)
    with striped(directories[:2], weights=[2, 1]) as handle:
        handle.sync_pwrite(tensor, "x")
    stripes = [raw(each) for each in tensor.split(STRIPE)]
    assert (directories[0] / "x.stripe0of2").read_bytes() == b"".join(stripes[n] for n in (0, 2, 3, 5))
    assert (directories[1] / "x.stripe1of2").read_bytes() == b"".join(stripes[n] for n in (1, 4))


def test_any_offset_strides_and_batches(directories: list[Path]) -> None:
    content = bytearray(20 * STRIPE)
    with striped(directories) as handle:
        handle.sync_pwrite(torch.zeros(20 * STRIPE, dtype=torch.uint8), "x")
        for offset, nbytes in (
            (1, 1),
            (STRIPE - 1, 2),
            (100_001, 300_003),
            (7 * STRIPE, STRIPE),
            (19 * STRIPE + 5, 99),
        ):
            tensor = noise(nbytes, seed=offset)
            handle.sync_pwrite(tensor, "x", offset)
            content[offset : offset + nbytes] = raw(tensor)
        strided = noise(1000 * 300).view(1000, 300).t()
        handle.sync_pwrite(strided, "x", 333)
        content[333 : 333 + 300_000] = raw(strided)
        whole = torch.zeros(20 * STRIPE, dtype=torch.uint8)
        handle.read(whole, "x", True)
        assert raw(whole) == content
        back = torch.zeros(1000, 300, dtype=torch.uint8).t()
        handle.sync_pread(back, "x", 333)
        assert torch.equal(back, strided)
        tensors = [noise(n, seed=n) for n in (10, 70_000, 5, 200_000)]
        handle.submit_write_batch(tensors, "batch").wait()
        into = [torch.zeros_like(each) for each in tensors]
        handle.submit_read_batch(into, "batch").wait()
        assert all(map(torch.equal, tensors, into))


def test_a_shorter_rewrite_leaves_no_stale_tail(directories: list[Path]) -> None:
    with striped(directories) as handle:
        handle.sync_pwrite(noise(20 * STRIPE), "x")
        handle.write(noise(5 * STRIPE + 3, seed=1), "x", True)
        with pytest.raises(IoError, match=f"{5 * STRIPE + 3} bytes"):
            handle.sync_pread(noise(5 * STRIPE + 4), "x")


def test_the_files_own_layout_holds_and_directories_may_change_places(directories: list[Path]) -> None:
    tensor, back = noise(20 * STRIPE + 5), torch.zeros(20 * STRIPE + 5, dtype=torch.uint8)
    with striped(directories, weights=[3, 1, 1]) as handle:
        handle.sync_pwrite(tensor, "x")
    with AioHandle(directories=directories[::-1], stripe_bytes=1 << 20) as handle:
        handle.sync_pread(back, "x")
        assert torch.equal(tensor, back)
        handle.sync_pwrite(back[:100], "x", 9 * STRIPE - 50)
    with striped(directories) as handle:
        handle.sync_pread(back, "x")
    tensor[9 * STRIPE - 50 : 9 * STRIPE + 50] = tensor[:100].clone()
    assert torch.equal(tensor, back)


def test_other_paths_are_what_they_are(directories: list[Path], path: Path) -> None:
    with striped(directories) as handle:
        handle.sync_pwrite(noise(5000), path)
        descriptor = os.open(path, os.O_RDWR)
        handle.async_pwrite(noise(100, seed=1), fd=descriptor)
        handle.wait()
        os.close(descriptor)
    assert path.read_bytes() == raw(noise(100, seed=1)) + raw(noise(5000))[100:]


def test_each_drive_has_a_thread_of_its_own(directories: list[Path], small_tmpfs: Path) -> None:
    def io_threads() -> int:
        return live_threads().count("swapper-io")

    before = io_threads()
    handle = striped([directories[0], directories[1], small_tmpfs])
    assert io_threads() == before + 1
    tensor, back = noise(STRIPE * 9), torch.zeros(STRIPE * 9, dtype=torch.uint8)
    handle.sync_pwrite(tensor, "x")
    handle.sync_pread(back, "x")
    assert torch.equal(tensor, back)
    assert io_threads() == before + 2, "two directories are on one drive"
    assert handle.bytes_read == handle.bytes_written == STRIPE * 9
    handle.close()
    assert io_threads() == before


def test_a_drive_that_is_full_fails_the_operation(directories: list[Path], small_tmpfs: Path) -> None:
    with striped([directories[0], small_tmpfs]) as handle:
        for tensor in (noise(16 << 20), noise(16 << 20).view(4096, 4096).t()):
            with pytest.raises(IoError) as raised:
                handle.sync_pwrite(tensor, "x")
            assert raised.value.errno == errno.ENOSPC
            assert "stripe1of2" in raised.value.path
        small = noise(STRIPE * 3)
        handle.write(small, "y", True)


def test_what_is_missing_or_strange_is_named(directories: list[Path]) -> None:
    tensor = noise(10 * STRIPE)
    with striped(directories) as handle:
        with pytest.raises(IoError, match=r"no\.stripes") as raised:
            handle.sync_pread(tensor, "no")
        assert raised.value.errno == errno.ENOENT
        handle.sync_pwrite(tensor, "x")
        handle.sync_pwrite(tensor, "other")
        with pytest.raises(ConfigError, match="below"):
            handle.sync_pwrite(tensor, "../x")
    with striped(directories[:2]) as handle, pytest.raises(IoError, match="not those of one file over 2"):
        handle.sync_pread(tensor, "x")
    with striped(directories) as handle:
        (directories[1] / "x.stripe1of3").rename(directories[1] / "away")
        with pytest.raises(IoError, match=r"x\.stripe1of3"):
            handle.sync_pread(tensor, "x")
        record = directories[1] / "x.stripes"
        for content in ("{}", "", "[1]", (directories[1] / "other.stripes").read_text()):
            record.write_text(content)
            for use in (handle.sync_pread, handle.sync_pwrite):
                with pytest.raises(IoError, match=r"x\.stripes"):
                    use(tensor, "x")
        record.unlink()
        with pytest.raises(IoError, match=r"x\.stripes"):
            handle.sync_pwrite(tensor, "x")


@pytest.mark.whole
@pytest.mark.parametrize(
    "options",
    [
        {"directories": []},
        {"stripe_bytes": 1000},
        {"stripe_bytes": 0},
        {"weights": [1]},
        {"weights": [1, 0, 1]},
        {"weights": [1, -1, 1]},
        {"weights": [1, 1, float("nan")]},
        {"weights": [1, 1, 1000]},
    ],
)
def test_options_that_make_no_sense(directories: list[Path], options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        AioHandle(**{"directories": directories, **options})  # type: ignore[arg-type]


def test_directories_that_are_none(directories: list[Path], path: Path) -> None:
    path.write_bytes(b"")
    for wrong in ([*directories, directories[0]], [path], [path.parent / "missing"]):
        with pytest.raises(ConfigError):
            AioHandle(directories=wrong)

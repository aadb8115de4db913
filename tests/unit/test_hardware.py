"""Links, nodes and drives are read from the kernel's files: here from files of the same form."""

from __future__ import annotations

from pathlib import Path

import pytest

from swapper.cli.doctor import PcieLink, numa_node_of, numa_nodes, read_text, written_a_day


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")
    return folder


@pytest.mark.parametrize(("lanes", "narrow"), [("16", False), ("4", True)])
def test_a_link_is_found_at_the_device_or_above_and_may_be_narrow(lanes: str, narrow: bool, tmp_path: Path) -> None:
    speeds = {"current_link_speed": "2.5 GT/s PCIe", "max_link_speed": "32.0 GT/s PCIe"}
    write(tmp_path / "pci", current_link_width=lanes, max_link_width="16", **speeds)
    link = PcieLink.of(write(tmp_path / "pci" / "nvme" / "nvme0"))
    assert link is not None and link.is_narrow is narrow
    assert str(link) == f"PCIe with {lanes}{' of 16' if narrow else ''} lanes of at most 32.0 GT/s"


def test_without_pcie_there_is_no_link(tmp_path: Path) -> None:
    assert PcieLink.of(write(tmp_path / "virtual")) is None


@pytest.mark.parametrize(("text", "nodes"), [("0", [0]), ("0-1", [0, 1]), ("0,2-3", [0, 2, 3])])
def test_nodes_are_a_list_of_ranges(text: str, nodes: list[int], tmp_path: Path) -> None:
    assert numa_nodes(write(tmp_path / "node", has_memory=text)) == nodes


def test_a_machine_without_nodes_has_none(tmp_path: Path) -> None:
    assert numa_nodes(tmp_path / "missing") == []


@pytest.mark.parametrize(("text", "node"), [("1", 1), ("-1", None)])
def test_the_node_of_a_drive_may_be_unknown(text: str, node: int | None, tmp_path: Path) -> None:
    disk = write(tmp_path / "nvme0n1")
    write(disk / "device", numa_node=text)
    assert numa_node_of(disk) == node


def test_written_bytes_are_sectors_of_512(tmp_path: Path) -> None:
    written, a_day = written_a_day(write(tmp_path / "disk", stat="   1 2 3 4 5 6 2000 8 9"))
    assert written == 2000 * 512 and a_day > 0
    assert written_a_day(write(tmp_path / "none")) == (0, 0) and read_text(tmp_path / "none" / "stat") == ""

"""Memory that is copied to a device is taken from the node that the device is attached to."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from numa import may_choose_nodes, policies

from swapper import _C
from swapper.device.device import SYSFS, node_of_device
from swapper.paging.host_memory import HostMemory

GPU = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)


def machine(root: Path, nodes: str, node_of_gpu: str) -> Path:
    (root / "devices/system/node").mkdir(parents=True)
    (root / "devices/system/node/online").write_text(nodes + "\n")
    (root / "bus/pci/devices/0000:c1:00.0").mkdir(parents=True)
    (root / "bus/pci/devices/0000:c1:00.0/numa_node").write_text(node_of_gpu + "\n")
    return root


@pytest.mark.whole
@pytest.mark.parametrize(
    ("nodes", "of_gpu", "expected"),
    [("0-1", "1", 1), ("0-3", "0", 0), ("0", "0", None), ("0-1", "-1", None), ("0-1", "", None)],
)
def test_the_node_is_the_one_that_the_kernel_names(
    tmp_path: Path, nodes: str, of_gpu: str, expected: int | None
) -> None:
    assert node_of_device(GPU, machine(tmp_path, nodes, of_gpu)) == expected


def test_what_the_system_does_not_say_is_none(tmp_path: Path) -> None:
    assert node_of_device(GPU, tmp_path) is None
    assert node_of_device(SimpleNamespace(), machine(tmp_path, "0-1", "1")) is None
    other = SimpleNamespace(pci_domain_id=0, pci_bus_id=2, pci_device_id=0)
    assert node_of_device(other, tmp_path) is None


def test_an_arena_prefers_its_node_wherever_the_system_allows_that() -> None:
    arena, other = _C.Arena(4 << 20, node=0), _C.Arena(4 << 20)
    assert (arena.node, other.node) == (0 if may_choose_nodes() else None, None)
    lines = policies()
    if lines:
        assert ("prefer" in lines[arena.address]) == may_choose_nodes()
        assert "prefer" not in lines[other.address]


def test_a_node_that_is_not_there_is_said_and_the_memory_works() -> None:
    missing = max(map(int, (SYSFS / "devices/system/node/online").read_text().replace("-", ",").split(","))) + 900
    for node in (missing, 5000, -3):
        memory = HostMemory(node)
        arena, bytes_ = memory.take(8192)
        assert arena.node is None
        assert memory.describe().endswith(f"node {node} was refused")
        assert bytes_.fill_(7).sum() == 7 * 8192
        del bytes_
        memory.close()

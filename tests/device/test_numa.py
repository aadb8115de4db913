"""Memory that is copied to a device is taken from the node that the device is attached to."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from swapper import _C
from swapper.device.numa import SYSFS, node_of_device
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


def policy_of(address: int) -> str:
    """The kernel's line about the mapping that begins at an address."""
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    return next(line for line in lines if int(line.split()[0], 16) == address)


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="this kernel has no nodes")
def test_an_arena_prefers_its_node() -> None:
    arena = _C.Arena(4 << 20, node=0)
    if arena.node is None:
        pytest.skip("this container may not choose nodes")
    assert "prefer" in policy_of(arena.address)
    other = _C.Arena(4 << 20)
    assert "prefer" not in policy_of(other.address)


def test_a_node_that_is_not_there_is_said_and_the_memory_works() -> None:
    missing = max(map(int, (SYSFS / "devices/system/node/online").read_text().replace("-", ",").split(","))) + 900
    for node in (missing, 5000, -3):
        memory = HostMemory()
        memory.node = node
        arena, bytes_ = memory.take(8192)
        assert arena.node is None
        assert memory.describe().endswith(f"node {node} was refused")
        assert bytes_.fill_(7).sum() == 7 * 8192
        del bytes_
        memory.close()

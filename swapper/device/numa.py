"""Finds the part of host memory (NUMA node) that a device is attached to: copies from others cross a link between processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SYSFS = Path("/sys")


def node_of_device(properties: Any, sysfs: Path = SYSFS) -> int | None:
    """Return the number of the node of a device; None if there is only one node, or the system does not say.

    Args:
        properties: of the device, as torch has them: pci_domain_id, pci_bus_id, pci_device_id.
        sysfs: where the kernel describes devices.
    """
    try:
        domain, bus, device = (int(getattr(properties, f"pci_{part}_id")) for part in ("domain", "bus", "device"))
        if (sysfs / "devices/system/node/online").read_text().strip() == "0":
            return None
        text = (sysfs / f"bus/pci/devices/{domain:04x}:{bus:02x}:{device:02x}.0/numa_node").read_text()
        node = int(text)
    except (AttributeError, TypeError, ValueError, OSError):  # another kind of device, or a container that hides it
        return None
    return node if node >= 0 else None

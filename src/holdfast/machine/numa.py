"""Memory near a device: the NUMA node of a PCI device, and pages that come from one node.

A machine with several sockets has a node of memory for each. A copy from a device to the other
socket's memory crosses the link between sockets, which all devices share.

The kernel's calls have no wrapper in Python's library, and libnuma may be missing. So the one call
that is needed is made by its number.
"""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

_SYSTEM = Path("/sys")
_MBIND_NUMBER = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1
"""Pages come from another node where this one is full. A strict policy would wake the kernel's OOM
killer there."""
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def device_numa_node(pci_address: str, system: Path = _SYSTEM) -> int | None:
    """Return the NUMA node of a PCI device ("0000:dc:00.0").

    Return None if the kernel does not know it (-1), or if this machine has one node only. system:
    where the kernel lists devices.
    """
    nodes = list((system / "devices" / "system" / "node").glob("node[0-9]*"))
    try:
        text = (system / "bus" / "pci" / "devices" / pci_address / "numa_node").read_text("ascii")
        node = int(text)
    except (OSError, ValueError):
        return None
    return node if node >= 0 and len(nodes) > 1 else None


def prefer_numa_node(address: int, nbytes: int, node: int) -> None:
    """Let the pages of a mapping come from `node` when they are touched for the first time.

    The kernel keeps this with the file behind a shared mapping, so it holds for every process that
    maps it. Raises OSError.
    """
    number = _MBIND_NUMBER.get(platform.machine())
    if number is None:
        raise OSError(0, f"no number of mbind is known for {platform.machine()}")
    words = node // _WORD_BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    # The kernel reads one bit less than this says.
    bits = ctypes.c_ulong(words * _WORD_BITS + 1)
    failed = ctypes.CDLL(None, use_errno=True).syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_long(_MPOL_PREFERRED),
        mask,
        bits,
        ctypes.c_ulong(0),
    )
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))

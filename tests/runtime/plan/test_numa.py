"""Memory near a device: the kernel's list of devices, and its word on real pages."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from holdfast.checkpoint.memory.arena import PAGE, Arena
from holdfast.machine.numa import device_numa_node, prefer_numa_node

ADDRESS = "0000:dc:00.0"


def system(folder: Path, nodes: int, text: str | None) -> Path:
    """The part of /sys that counts, of a machine with some nodes and one device."""
    for node in range(nodes):
        (folder / "devices/system/node" / f"node{node}").mkdir(parents=True)
    if text is not None:
        device = folder / "bus/pci/devices" / ADDRESS
        device.mkdir(parents=True)
        (device / "numa_node").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("nodes", "text", "due"),
    [
        (2, "1\n", 1),
        (2, "0\n", 0),
        (2, "-1\n", None),  # a virtual machine, mostly
        (1, "0\n", None),
        (0, "0\n", None),  # a kernel without NUMA
        (2, None, None),
        (2, "", None),
    ],
)
def test_the_node_of_a_device(tmp_path: Path, nodes: int, text: str | None, due: int) -> None:
    assert device_numa_node(ADDRESS, system(tmp_path, nodes, text)) == due


def policies(name: str) -> list[str]:
    """The kernel's policy for each mapping of a memory file in this process."""
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    return [line.split()[1] for line in lines if f"memfd:{name}" in line]


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="the kernel knows no NUMA")
def test_the_pages_of_an_arena_come_from_the_node_that_is_asked_for() -> None:
    for name, node, due in (("near", 0, "prefer:0"), ("anywhere", None, "default")):
        fd = Arena.create(name, 2, PAGE, node)
        assert policies(name) == []  # the mapping that told the kernel is closed
        arena = Arena(fd)
        assert policies(name) == [due]
        arena.close()
        os.close(fd)


def test_a_node_that_is_not_there_costs_no_arena(caplog: pytest.LogCaptureFixture) -> None:
    fd = Arena.create("far", 2, PAGE, 63)
    Arena(fd).close()
    os.close(fd)
    (record,) = caplog.records
    assert "on NUMA node 63" in record.message


def test_the_kernels_refusal_is_an_error() -> None:
    with mmap.mmap(-1, PAGE) as memory:
        start = ctypes.c_char.from_buffer(memory)
        with pytest.raises(OSError, match="Invalid argument"):
            prefer_numa_node(ctypes.addressof(start), PAGE, 1000)
        del start

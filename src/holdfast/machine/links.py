"""The fast links of this machine, found without torch.

    NVLink       `nvidia-smi topo -m`: "NV18" for two cards that 18 links join
    xGMI         the kernel's list of compute nodes (AMD)
    InfiniBand   the kernel's list of ports; those of RoCE and EFA are in it, too

None of it has run on a machine with such links.
"""

from __future__ import annotations

import re
from pathlib import Path

from holdfast.core.transports import CardLink, NetworkPort, NodeLinks
from holdfast.machine.kernel_files import ask_tool, read_property, read_text

SYSTEM = Path("/sys")
TOPOLOGY_TIMEOUT_S = 20.0
"""Seconds that `nvidia-smi` gets. It initialises the driver if no other process has."""
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_NVLINK = re.compile(r"NV\d+")
_XGMI = 11  # the kernel's number for that type of link between compute nodes


def detect_links(system: Path | None = None) -> NodeLinks:
    """Look at this machine. system: where the kernel lists devices; None: `SYSTEM`."""
    place = SYSTEM if system is None else system
    topology = ask_tool(["nvidia-smi", "topo", "--matrix"], TOPOLOGY_TIMEOUT_S)
    cards = parse_topology(topology) or _xgmi_links(place)
    found = []
    for port in sorted((place / "class" / "infiniband").glob("*/ports/*")):
        if read_text(port / "state") == "4: ACTIVE":
            layer = read_text(port / "link_layer")
            layer = "RoCE" if layer == "Ethernet" else layer
            rate = read_text(port / "rate").partition(" (")[0]
            found.append(NetworkPort(port.parents[1].name, layer, rate))
    return NodeLinks(cards, tuple(found))


def parse_topology(text: str) -> tuple[CardLink, ...]:
    """The NVLinks in the matrix of `nvidia-smi topo -m`."""
    found = []
    for line in _ESCAPES.sub("", text).splitlines():
        name, *cells = line.split() or [""]
        if name.startswith("GPU") and name[3:].isdigit():
            row = int(name[3:])
            found += [
                CardLink(row, column, f"NVLink {cell}")
                for column, cell in enumerate(cells)
                if column > row and _NVLINK.fullmatch(cell)
            ]
    return tuple(found)


def _xgmi_links(system: Path) -> tuple[CardLink, ...]:
    nodes = system / "class" / "kfd" / "kfd" / "topology" / "nodes"
    gpus = [
        number
        for number in sorted(int(each.name) for each in nodes.glob("[0-9]*"))
        if read_property(nodes / str(number) / "properties", "simd_count")
    ]
    index = {number: at for at, number in enumerate(gpus)}
    found = []
    for link in sorted(nodes.glob("[0-9]*/io_links/*/properties")):
        one, other = read_property(link, "node_from"), read_property(link, "node_to")
        if read_property(link, "type") == _XGMI and one < other and {one, other} <= set(gpus):
            found.append(CardLink(index[one], index[other], "xGMI"))
    return tuple(found)

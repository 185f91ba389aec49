"""Collectives of the cost model against two sets of measurements, and the way it chooses.

SimAI (NSDI'25) states shares of the peak that rings reach on 1 to 128 nodes of 8 A100. Galvatron
states the bandwidth of rings of neighbours and of strided ranks on two nodes.
"""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

from holdfast.plan.cost.collectives import allreduce_s, gather_s, tree_s
from holdfast.plan.cost.group_links import ring_link
from holdfast.plan.hardware.cluster import NodePool
from holdfast.plan.hardware.link import Link, load_links

FOLDER = "network/hw-network-measured"
RATIOS = "simai_nic_ratio.csv"
STRIDED = "galvatron_allreduce_bandwidth_2nodes_8gpus_per_node.json"
DEVICES = 8
MIB = 2**20
UP_TO = 2**30
"""Bytes of the largest message in the table: larger ones all reach the peak."""


def lines(data: Path) -> Iterator[str]:
    """Tables of shares reached and of strided groups; nothing where the data are not."""
    folder = data / FOLDER
    if (folder / RATIOS).is_file():
        yield from _ratios(folder / RATIOS)
    if (folder / STRIDED).is_file():
        yield from _strided(folder / STRIDED)


def _pool(nodes: int) -> NodePool:
    links = load_links()
    return NodePool("", nodes, DEVICES, "A100-80", links["nvlink3"].link, links["ib-hdr"].link)


def _ratios(path: Path) -> Iterator[str]:
    links = load_links()
    peaks = links["nvlink3"].peak, DEVICES * links["ib-hdr"].peak
    nodes = [2**power for power in range(8)]
    yield "all-reduce of rings, share of the peak: measured / predicted; * a tree would be faster"
    yield f"{'MiB':>6}" + "".join(f"{number:>14}" for number in nodes) + "  nodes"
    errors = list[float]()
    with path.open(encoding="utf-8") as file:
        table = list(csv.reader(file))[1:]
    for row in table:
        size = float(row[0])
        if size > UP_TO:
            break
        cells = [
            _cell(size, number, float(cell), peaks[number > 1], errors)
            for number, cell in zip(nodes, row[1:9], strict=True)
        ]
        yield f"{size / MIB:6.0f}" + "".join(f"{cell:>14}" for cell in cells)
    sizes = [abs(error) for error in errors]
    yield (
        f"  {len(sizes)} shares: mean error {100 * statistics.mean(sizes):.0f} %, median "
        f"{100 * statistics.median(sizes):.0f} %"
    )


def _cell(size: float, nodes: int, measured: float, peak: float, errors: list[float]) -> str:
    pool, ranks = _pool(nodes), nodes * DEVICES
    link = ring_link(pool, ranks, 1)
    ring = link.allreduce_s(size, ranks)
    reached = link.reached(size, ranks, peak)
    errors.append(reached / measured - 1)
    # parts are summed in each node, then between nodes, and gathered in each node
    inside = 2 * gather_s(pool.inside, size, DEVICES)
    inside += allreduce_s(pool.outside, size / DEVICES, nodes)
    mark = "*" if tree_s(link, size, ranks) < min(ring, inside) else " "
    return f"{measured:.3f}/{reached:.3f}{mark}"


def _strided(path: Path) -> Iterator[str]:
    measured = json.loads(path.read_text("utf-8"))
    gb = {name: 1.048576 * value for name, value in measured.items()}
    inside = Link(0, gb["allreduce_size_8_consec_1"] * 1e9)
    outside = Link(0, gb["allreduce_size_16_consec_1"] * 1e9 / DEVICES)
    pool = NodePool("", 2, DEVICES, "A100-80", inside, outside)
    yield "rings on two nodes of 8, GB/s: measured / predicted from the ring of 16"
    for ranks in (8, 4, 2):
        value = gb[f"allreduce_size_{ranks}_consec_0"]
        near = gb[f"allreduce_size_{ranks}_consec_1"]
        reached = ring_link(pool, ranks, 16 // ranks).bandwidth / 1e9
        yield (
            f"  {ranks} ranks strided {value:6.1f} / {reached:6.1f}, neighbours {near:6.1f} / "
            f"{inside.bandwidth / 1e9:.1f}: dearer by {near / value:.1f} / "
            f"{inside.bandwidth / 1e9 / reached:.1f}"
        )

"""The fast links of a machine: a fake `nvidia-smi`, and a fake folder of the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.core.transports import CardLink, NetworkPort, NodeLinks
from holdfast.machine.links import detect_links, parse_topology
from holdfast.plan.cost.choice import ReplicaChoice
from holdfast.plan.cost.collectives import allreduce_s, tree_s
from holdfast.plan.cost.group_links import exchange_links, group_links, ring_link
from holdfast.plan.hardware.cluster import Cluster, NodePool
from holdfast.plan.hardware.link import Link, load_links

EIGHT = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-51,104-155\t0\t\tN/A
GPU1\tNV18\t X \tNV4\tSYS\t0-51,104-155\t0\t\tN/A
GPU2\tSYS\tNV4\t X \tSYS\t52-103,156-207\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""
ALONE = (
    "\t\x1b[4mGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\nGPU0\t X \t0-15\t0\t\tN/A\n"
)

TOOL = f"#!/bin/sh\n[ \"$*\" = 'topo --matrix' ] && cat <<'E'\n{EIGHT}E\n"


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_nvlinks_are_those_of_the_matrix() -> None:
    assert parse_topology(EIGHT) == (CardLink(0, 1, "NVLink NV18"), CardLink(1, 2, "NVLink NV4"))
    assert parse_topology(ALONE) == parse_topology("") == ()


def test_a_machine_with_nvlink_and_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    write(tool.parent, **{tool.name: TOOL})
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    ports = tmp_path / "sys/class/infiniband"
    rate = "400 Gb/sec (4X NDR)\n"
    write(ports / "mlx5_0/ports/1", state="4: ACTIVE\n", link_layer="InfiniBand\n", rate=rate)
    write(ports / "mlx5_1/ports/1", state="1: DOWN\n", link_layer="InfiniBand\n", rate=rate)
    write(ports / "mlx5_2/ports/1", state="4: ACTIVE\n", link_layer="Ethernet\n", rate=rate)
    found = detect_links(tmp_path / "sys")
    assert len(found.cards) == 2
    assert found.ports == (
        NetworkPort("mlx5_0", "InfiniBand", "400 Gb/sec"),
        NetworkPort("mlx5_2", "RoCE", "400 Gb/sec"),
    )
    assert (found.between(1, 0), found.between(0, 2)) == ("NVLink NV18", "")


def test_a_machine_with_xgmi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    nodes = tmp_path / "class/kfd/kfd/topology/nodes"
    write(nodes / "0", properties="simd_count 0\n")
    for number in (1, 2):
        write(nodes / str(number), properties="simd_count 304\n")
        link = f"type 11\nnode_from {number}\nnode_to {3 - number}\n"
        write(nodes / str(number) / "io_links/1", properties=link)
        write(
            nodes / str(number) / "io_links/0",
            properties=f"type 2\nnode_from {number}\nnode_to 0\n",
        )
    assert detect_links(tmp_path) == NodeLinks((CardLink(0, 1, "xGMI"),))
    assert detect_links(tmp_path / "none") == NodeLinks()


# --- links ----------------------------------------------------------------------------------------
LINKS = load_links()
MIB = 2**20
SIMAI_PEAK = 200e9
"""Of a node's network in SimAI's ratios: eight ports of 200 Gbit/s, in bytes a second."""

# SimAI (NSDI'25), measured share of the peak bus bandwidth: (nodes of eight, MiB): share.
NETWORK = {
    (2, 16): 0.32,
    (2, 1024): 0.92,
    (8, 16): 0.13,
    (8, 256): 0.69,
    (8, 1024): 0.90,
    (32, 64): 0.106,
    (32, 1024): 0.74,
    (128, 16): 0.0087,
    (128, 256): 0.1027,
    (128, 1024): 0.3146,
}
ONE_NODE = {16: 0.45, 32: 0.55, 64: 0.65, 128: 0.69, 256: 0.73, 1024: 0.77, 16384: 0.81}


def test_small_messages_over_many_nodes_reach_what_was_measured() -> None:
    """No table: the ring's steps and one latency give 0.0087 of the peak on 128 nodes."""
    hdr = LINKS["ib-hdr"].link
    node = Link(hdr.latency_s, 8 * hdr.bandwidth)  # the ring of a node uses all its ports
    errors = [
        abs(node.reached(mib * MIB, 8 * nodes, SIMAI_PEAK) / share - 1)
        for (nodes, mib), share in NETWORK.items()
    ]
    assert max(errors) < 0.3
    assert sum(errors) / len(errors) < 0.12


def test_one_node_reaches_what_was_measured() -> None:
    nvlink = LINKS["nvlink3"]
    for mib, share in ONE_NODE.items():
        assert abs(nvlink.link.reached(mib * MIB, 8, nvlink.peak) / share - 1) < 0.05, mib


def test_messages_collectives_and_shares() -> None:
    link = Link(1e-3, 1e6)
    assert link.message_s(1000) == 2e-3
    assert link.allreduce_s(4000, 4) == 6 * 2e-3
    assert link.allreduce_s(4000, 1) == 0
    assert link.shared_by(4).message_s(1000) == 5e-3
    with_ramp = Link(1e-3, 1e6, ramp=2.0)
    assert with_ramp.message_s(1000) == 4e-3  # (sqrt(1 ms) + sqrt(1 ms))^2
    assert with_ramp.message_s(1e9) < 1.01 * link.message_s(1e9)
    assert with_ramp.shared_by(2).ramp == 2.0


# --- which link a group crosses, against two measured nodes of 8 devices --------------------------
GB = 1e9
# Galvatron's allreduce_bandwidth_2nodes_8gpus_per_node.json in GB/s of bus bandwidth: 16 neighbours
# 46.9, 8 strided 21.8, 4 strided 17.0, 2 strided 8.5, and 8 neighbours 163
TWO_NODES = NodePool("a", 2, 8, "A100-80", Link(4.5e-6, 163 * GB), Link(8.7e-6, 46.9 / 8 * GB))


@pytest.mark.parametrize(
    ("ranks", "distance", "measured"),
    [(16, 1, 46.9), (8, 2, 21.8), (4, 4, 17.0), (2, 8, 8.5), (8, 1, 163.2)],
)
def test_a_ring_reaches_the_cards_of_its_own_ranks(
    ranks: int, distance: int, measured: float
) -> None:
    reached = ring_link(TWO_NODES, ranks, distance).bandwidth / GB
    assert reached == pytest.approx(measured, rel=0.35)


def test_a_strided_group_is_7_to_28_times_dearer_than_neighbours() -> None:
    near, size = ring_link(TWO_NODES, 8, 1), 2**30
    for ranks, distance in ((8, 2), (4, 4), (2, 8)):
        times = ring_link(TWO_NODES, ranks, distance).allreduce_s(size, ranks)
        assert 6 < times / near.allreduce_s(size, ranks) < 29


def test_gradients_of_experts_travel_between_their_copies() -> None:
    pool = NodePool("a", 8, 8, "B300", Link(0, 400 * GB), Link(0, 50 * GB))
    group = ReplicaChoice(1, 1, 64, 1, 1, (4,), ("a",), 1)
    links = group_links(Cluster((pool,)), group, 0, 1, ep=8)
    # 8 ranks with the same experts, one in each node, by one card; all 64 by eight cards
    assert links.copies.bandwidth == 50 * GB
    assert links.shards.bandwidth == 400 * GB


def test_a_small_sum_of_many_ranks_goes_by_trees() -> None:
    link = Link(10e-6, 25 * GB)
    assert allreduce_s(link, 2**20, 1024) == tree_s(link, 2**20, 1024)
    assert allreduce_s(link, 2**34, 8) == link.allreduce_s(2**34, 8)
    assert allreduce_s(link, 2**20, 1) == 0


def test_a_ring_across_nodes_is_no_faster_than_the_links_inside() -> None:
    pool = NodePool("a", 2, 8, "H100-80", Link(4e-6, 100 * GB), Link(8e-6, 50 * GB))
    assert ring_link(pool, 16, 1).bandwidth == 100 * GB


def test_an_exchange_sends_a_token_once_to_each_node() -> None:
    pool = NodePool("a", 2, 8, "H100-80", Link(0, 400 * GB), Link(0, 50 * GB))
    # of two nodes an expert's token needs the other one half of the time; of 8 experts almost all
    assert exchange_links(pool, 16, 1).seconds(GB, 1) == pytest.approx(0.5 / 50)
    assert exchange_links(pool, 16, 1).seconds(GB, 8) == pytest.approx((2 - 2**-7) / 2 / 50)
    assert exchange_links(pool, 8, 1).seconds(GB, 1) == pytest.approx(7 / 8 / 400)

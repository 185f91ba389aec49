"""New replicas and the racks, power domains, pools and zones of the nodes."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from holdfast.checkpoint.memory.arena import PAGE, Arena
from holdfast.config.run import RunConfig
from holdfast.machine.numa import device_numa_node, prefer_numa_node
from holdfast.plan.hardware.cluster_file import parse_cluster
from holdfast.plan.hardware.distance import hundredfold_gbit_s, times_dearer
from holdfast.plan.hardware.link import Link
from holdfast.plan.placing.domains import (
    ASSUMED_LINKS,
    LEVELS,
    DomainChooser,
    PlacementCosts,
    links_of,
    meeting_level,
    placement_cost,
)
from holdfast.plan.placing.interface import NodePlaces, PresentPlacement
from holdfast.plan.placing.planner import plan_layout
from holdfast.policy.placement import Machine


def run(workers: int, **layout: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "layout": {"workers": workers, **layout},
            "train": {"batch_size": 1024, "microbatch_size": 2},
            "model": {"dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "vocab_size": 128256},
            "data": {"sequence_length": 4096},
            "device": "cuda",
        }
    )


def nodes(
    racks: Sequence[str], places: int = 2, zone: str = "", pool: str = ""
) -> list[NodePlaces]:
    return [
        NodePlaces(
            f"n{i:02}",
            places,
            machine=Machine(f"n{i:02}", rack=rack, zone=zone or f"z{rack}", pool=pool),
        )
        for i, rack in enumerate(racks)
    ]


def racks_of(found: Sequence[str], of: Sequence[NodePlaces]) -> list[str]:
    by_name = {node.name: node.machine.rack for node in of if node.machine is not None}
    return [by_name[name] for name in found]


def test_a_replica_of_two_nodes_stays_in_one_rack_and_the_next_takes_another() -> None:
    there = nodes(["a", "b", "a", "b"], zone="z")
    plan = plan_layout(run(8, pp=4), there, 1)
    first, second = (
        {plan.topology.nodes[rank] for rank in replica.ranks} for replica in plan.topology.replicas
    )
    assert {first == {"n00", "n02"}, second == {"n01", "n03"}} == {True}


def test_without_domains_the_plan_is_the_one_of_the_packing_alone() -> None:
    there = nodes(["a", "b", "a", "b"], zone="z")
    bare = [NodePlaces(node.name, node.places) for node in there]
    plan = plan_layout(run(8, pp=4), bare, 1)
    assert plan.topology.nodes == ("n00", "n00", "n01", "n01", "n02", "n02", "n03", "n03")
    some = [*there[:3], bare[3]]  # a node whose place is not known: nothing is chosen
    assert plan_layout(run(8, pp=4), some, 1).topology.nodes == plan.topology.nodes


def test_stages_follow_the_racks_if_no_rack_is_large_enough() -> None:
    there = nodes(["a", "b", "a", "b"], zone="z")
    plan = plan_layout(run(8, pp=8), there, 1)
    racks = racks_of(plan.topology.nodes, there)
    assert sum(one != other for one, other in pairwise(racks)) == 1


def test_replicas_of_one_node_each_do_not_share_a_rack_that_may_fail() -> None:
    there = nodes(["a", "a", "b", "b"], zone="z")
    plan = plan_layout(run(4, pp=2), there, 1)
    racks = racks_of(plan.topology.nodes, there)
    assert {racks[replica.ranks[0]] for replica in plan.topology.replicas} == {"a", "b"}


def test_a_gap_is_filled_from_the_rack_of_the_replica() -> None:
    there = nodes(["a", "a", "b", "b", "a"], places=1, zone="z")
    before = plan_layout(run(4, pp=2), there[:4], 1)
    lost = before.topology.nodes.index("n01")
    left = [node for node in there if node.name != "n01"]
    after = plan_layout(run(4, pp=2), left, 2, PresentPlacement(before.topology, frozenset({lost})))
    for replica in after.topology.replicas:
        names = [after.topology.nodes[rank] for rank in replica.ranks]
        assert len(set(racks_of(names, there))) == 1
    assert "n04" in after.topology.nodes


def test_tensor_groups_stay_inside_a_node() -> None:
    there = nodes(["a", "b", "a", "b"], places=3, zone="z")
    plan = plan_layout(run(8, pp=2, tp=2), there, 1)
    for replica in plan.topology.replicas:
        for first in replica.ranks[::2]:
            assert plan.topology.nodes[first] == plan.topology.nodes[first + 1]


def test_the_choice_is_the_best_of_all_for_two_replicas_of_two_nodes() -> None:
    """Brute force over every pair of pairs of nodes."""
    there = nodes(["a", "b", "a", "c", "b", "c"], places=1, zone="z")
    machines = [node.machine for node in there if node.machine is not None]
    for costs in (
        PlacementCosts(),
        PlacementCosts(inner_bytes=0, gradient_bytes=1e9),
        PlacementCosts(restart_s=1e7),
    ):
        chooser = DomainChooser([node.machine for node in there], costs)
        free, placed = [1] * len(there), []
        for _ in range(2):
            among = chooser.choose(2, free)
            assert among is not None
            taken = [node for node in sorted(among) if free[node]][:2]
            for node in taken:
                free[node] = 0
            chooser.place(taken)
            placed.append([machines[node] for node in taken])
        best = min(
            placement_cost([[machines[i] for i in one], [machines[i] for i in other]], costs)
            for one in combinations(range(6), 2)
            for other in combinations(sorted({*range(6)} - {*one}), 2)
        )
        assert placement_cost(placed, costs) == pytest.approx(best)


def test_zones_are_worth_their_distance_only_if_they_fail_often() -> None:
    here = [Machine(f"n{i}", zone="us-east-1a", pool="spot-a") for i in range(2)]
    away = [Machine(f"m{i}", zone="us-east-1b", pool="spot-b") for i in range(2)]
    there = [*here, *away]
    rare = PlacementCosts(
        step_s=5,
        gradient_bytes=1e9,
        failures_per_day=dict.fromkeys(("node", "rack", "power", "pool", "zone"), 1e-3),
    )
    often = PlacementCosts(
        step_s=5,
        gradient_bytes=1e9,
        failures_per_day={"node": 1e-3, "rack": 0.0, "power": 0.0, "pool": 200.0, "zone": 0.0},
    )
    for costs, zones in ((rare, 1), (often, 2)):
        chooser = DomainChooser(there, costs)
        chooser.place([0])
        among = chooser.choose(1, [0, 1, 1, 1])
        assert among is not None
        likely = min(node for node in among if node)
        assert len({there[0].zone, there[likely].zone}) == zones


def test_links_and_losses_of_a_cluster_file_decide_where_replicas_stand() -> None:
    """Racks that are lost often keep replicas apart, and a slow link between them together."""
    there = nodes(["a", "a", "b", "b"], places=1, zone="z")
    racks = []
    for outside, lost in ((100, 20.0), (0.1, 0.0)):
        text = f"""
pools:
  one: {{nodes: 4, devices: 1, device: A100-80, nodes_per_rack: 2,
    outside: {{gbit_s: 400, latency_us: 5}}, across_racks: {{gbit_s: {outside}, latency_us: 9}}}}
domain_losses_per_day: {{rack: {lost}}}
"""
        cluster = parse_cluster(text, "c.yaml")
        plan = plan_layout(run(2), there, 1, cluster=cluster)
        racks.append(len(set(racks_of(plan.topology.nodes, there))))
    assert racks == [2, 1]


def test_a_level_that_no_file_names_is_never_faster_than_a_nearer_one() -> None:
    cluster = parse_cluster("pools: {a: {nodes: 2, devices: 8, device: V100-16}}", "c.yaml")
    pool, links = cluster.pools[0], links_of(cluster)
    assert [links[level] for level in LEVELS[:3]] == [pool.inside, pool.outside, pool.outside]
    speeds = [links[level].bandwidth for level in LEVELS]
    assert speeds == sorted(speeds, reverse=True)


def test_a_ring_at_its_limit_is_a_hundred_times_dearer() -> None:
    near = Link(3e-6, 200e9, 2.0)
    for far in (Link(10e-6, 1.0), Link(10e-6, 1.0, 2.0)):
        limit = hundredfold_gbit_s(near, far, 1e8, 8, 4)
        there = replace(far, bandwidth=limit * 1e9 / 8 / 4)
        assert times_dearer(near, there, 1e8, 8) == pytest.approx(100)
    assert hundredfold_gbit_s(near, Link(1.0, 1.0), 1e3, 8, 4) == float("inf")


def test_levels_come_from_names_of_zones_and_racks() -> None:
    one = Machine("a", rack="r1", zone="us-east-1a")
    assert meeting_level(one, Machine("a2", node="a", rack="r1", zone="us-east-1a")) == "node"
    assert meeting_level(one, Machine("b", rack="r1", zone="us-east-1a")) == "rack"
    assert meeting_level(one, Machine("b", rack="r2", zone="us-east-1a")) == "zone"
    assert meeting_level(one, Machine("b", rack="r1", zone="us-east-1b")) == "region"
    assert meeting_level(one, Machine("b", rack="r1", zone="us-west-2a")) == "world"
    assert (
        meeting_level(Machine("a", zone="us-central1-a"), Machine("b", zone="us-central1-f"))
        == "region"
    )
    assert meeting_level(Machine("a"), Machine("b")) == "rack"
    assert list(ASSUMED_LINKS) == list(LEVELS)


def test_a_farther_link_is_never_faster() -> None:
    for size in (1e3, 1e6, 1e9):
        times = [ASSUMED_LINKS[level].allreduce_s(size, 16) for level in LEVELS]
        assert times == sorted(times)


def test_a_thousand_nodes_are_planned_in_time_for_a_recovery() -> None:
    there = nodes([f"r{i // 16}" for i in range(128)], places=8, zone="z")
    plan = plan_layout(run(1024, pp=4, tp=4, dp_shard=2), there, 1)
    assert plan.topology.world_size == 1024
    for replica in plan.topology.replicas:
        names = [plan.topology.nodes[rank] for rank in replica.ranks]
        assert len(set(racks_of(names, there))) == 1


# --- memory near a device -------------------------------------------------------------------------
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

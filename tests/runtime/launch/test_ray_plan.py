"""What a run wants of Ray, and what the supervisor does about it, without a Ray."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.config.loading.load import resolve_config
from holdfast.launch.owners.owner import LaunchRequest, NodeState
from holdfast.launch.owners.ray.node import place_of
from holdfast.launch.owners.ray.plan import (
    Deeds,
    JobStatus,
    NodeReport,
    Observation,
    PlacedGroup,
    RaySpec,
    decide,
    kept_groups,
    make_groups,
    node_states,
)

A, B = ("node-0",), ("node-1",)
SPEC = RaySpec("run-1", (A, B), {"CPU": 1.0}, ("join", "/run", "--node", "{node}"))
TWO = {A: PlacedGroup("a", True), B: PlacedGroup("b", True)}


def report(group: str, code: int | None = None) -> NodeReport:
    """Of a node on the machine that is called as its group."""
    return NodeReport(group, group, f"host-{group}", 7, code)


def seen(
    groups: dict[tuple[str, ...], PlacedGroup],
    a: NodeReport | None = None,
    b: NodeReport | None = None,
    *,
    alive: str = "ab",
    draining: str = "",
) -> Observation:
    reports = {"node-0": a, "node-1": b}
    there = {node: found for node, found in reports.items() if found is not None}
    return Observation(groups, there, frozenset(alive), frozenset(draining))


def request(*settings: str, nodes: int = 4, spares: int = 0) -> LaunchRequest:
    config = resolve_config("name: r\n", "run.yaml", settings).config
    return LaunchRequest("r", "/r", Path("/r"), Path("/r/secret"), config, nodes, spares)


def test_the_nodes_of_a_replica_are_a_group_and_each_spare_is_its_own() -> None:
    pair = request("layout.pp=2", "layout.tp=2", "layout.workers=8", "cluster.places=2", spares=1)
    assert make_groups(pair) == (("node-0", "node-1"), ("node-2", "node-3"), ("node-4",))
    fits = request("layout.tp=2", "layout.workers=8", "cluster.places=2", nodes=2)
    assert make_groups(fits) == (A, B), "a replica fits on one node"
    together = request("launch.ray.groups=run", nodes=2)
    assert make_groups(together) == (("node-0", "node-1"),)


def test_another_number_of_nodes_tears_no_group_apart() -> None:
    pair = ("node-0", "node-1")
    assert kept_groups((A,), (A, B)) == (A, B)
    assert kept_groups((A, B), (A,)) == (A,)
    assert kept_groups((A,), (pair, ("node-2", "node-3"))) == (A, B, ("node-2", "node-3"))


def test_groups_are_made_at_once_and_wait_for_machines() -> None:
    assert decide(SPEC, seen({})) == Deeds(create=(A, B))
    waiting = seen({A: PlacedGroup("a", True), B: PlacedGroup("b", False)}, report("a"))
    assert decide(SPEC, waiting) == Deeds(), "Ray's autoscaler sees what waits"
    states = node_states(SPEC, waiting)
    assert [each.state for each in states] == [NodeState.RUNNING, NodeState.WAITING]
    assert "no machine" in states[1].detail


def test_a_node_whose_machine_drains_is_placed_again_once_it_has_left() -> None:
    draining = seen(TWO, report("a"), report("b"), draining="b")
    assert decide(SPEC, draining) == Deeds(), "the agent leaves by itself"
    assert "drains" in node_states(SPEC, draining)[1].detail
    left = seen(TWO, report("a"), report("b", 0), draining="b")
    assert decide(SPEC, left) == Deeds(remove=(B,), forget=B)
    assert decide(SPEC, seen({A: TWO[A]}, report("a"))) == Deeds(create=(B,))


def test_all_machines_drain_at_once_and_the_run_waits_for_others() -> None:
    left = seen(TWO, report("a", 0), report("b", 0), draining="ab")
    assert decide(SPEC, left) == Deeds(remove=(A, B), forget=(*A, *B))


def test_a_lost_machine_is_left_to_ray() -> None:
    lost = seen({A: TWO[A], B: PlacedGroup("b", False)}, report("a"), report("b"), alive="a")
    assert decide(SPEC, lost) == Deeds()
    assert node_states(SPEC, lost)[1].state is NodeState.WAITING
    again = seen(TWO, report("a"), report("b"), alive="ac")
    assert decide(SPEC, again) == Deeds(), "the report of the lost machine does not count"
    assert node_states(SPEC, again)[1].detail == "Ray starts it"


def test_a_node_that_failed_gives_its_machine_back_and_is_not_started_again() -> None:
    failed = seen(TWO, report("a"), report("b", 2))
    assert decide(SPEC, failed) == Deeds(remove=(B,))
    assert decide(SPEC, seen({A: TWO[A]}, report("a"), report("b", 2))) == Deeds()
    state = node_states(SPEC, failed)[1]
    assert (state.state, state.detail) == (NodeState.FAILED, "host-b, exit code 2")


@pytest.mark.parametrize(
    "end",
    [
        seen(TWO, report("a", 0), report("b", 0)),
        seen(TWO, report("a", 0), report("b", 1)),
        seen(TWO, report("a", 3), report("b", 3)),
        seen({A: TWO[A], B: PlacedGroup("b", False)}, report("a", 0)),
    ],
    ids=["complete", "one failed", "gave up", "complete, and a machine is still awaited"],
)
def test_the_job_is_over(end: Observation) -> None:
    assert decide(SPEC, end) == Deeds(remove=(A, B), is_over=True)


def test_down_ends_the_job_when_the_agents_have_left() -> None:
    stop = replace(SPEC, stop=True)
    assert decide(stop, seen(TWO, report("a"), report("b", 0))) == Deeds(remove=(B,))
    assert decide(stop, seen({B: PlacedGroup("b", False)}, report("a", 0))).is_over


def test_a_node_that_is_no_longer_wanted_leaves() -> None:
    one = replace(SPEC, groups=(A,))
    assert decide(one, seen(TWO, report("a"), report("b"))) == Deeds()
    assert decide(one, seen(TWO, report("a"), report("b", 0))) == Deeds(remove=(B,))
    assert decide(one, seen({A: TWO[A], B: PlacedGroup("b", False)}, report("a"))) == Deeds(
        remove=(B,)
    )


def test_what_is_stored_is_read_again() -> None:
    status = JobStatus(tuple(node_states(SPEC, seen(TWO, report("a")))), is_over=True)
    assert JobStatus.from_json(status.to_json()) == status
    assert RaySpec.from_json(SPEC.to_json()) == SPEC
    assert NodeReport.from_json(report("a", 3).to_json()) == report("a", 3)
    assert SPEC.command("node-1") == ["join", "/run", "--node", "node-1"]


def test_labels_of_a_machine_name_its_place() -> None:
    labels = {"ray.io/availability-zone": "eu-1a", "rack": "r7", "team": "x"}
    assert place_of(labels) == "zone=eu-1a,rack=r7"

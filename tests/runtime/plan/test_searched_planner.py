"""The planner that searches: fast layouts, few moves, and the simple planner where it must."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import inf, prod
from typing import Any

import pytest

from holdfast.config.run import RunConfig
from holdfast.errors import LayoutError
from holdfast.layout import Topology
from holdfast.plan.hardware.cluster import NodePool
from holdfast.plan.hardware.devices import load_devices
from holdfast.plan.hardware.link import Link
from holdfast.plan.placing import searched
from holdfast.plan.placing.interface import NodePlaces, PresentPlacement
from holdfast.plan.placing.planner import plan_layout
from holdfast.plan.placing.searched import SearchedPlanner, nodes_left
from holdfast.plan.placing.topology_cost import Fleet, TopologyCost
from holdfast.policy.placement import Machine
from tests.runtime.plan.test_planner import nodes_of, without

FAST, SLOW = Link(10e-6, 20e9), Link(100e-6, 50e6)


def run_of(**changes: Any) -> RunConfig:
    given: dict[str, Any] = {
        "model": {"preset": "small", "vocab_size": 2048},
        "data": {"sequence_length": 128},
        "train": {"batch_size": 16, "microbatch_size": 2, "precision": "fp32"},
        "layout": {"workers": 0},
    }
    for section, values in changes.items():
        given[section] = given.get(section, {}) | values
    return RunConfig.model_validate(given)


def fleet_of(outside: Link = FAST, memory: float = 16e9) -> Fleet:
    devices = load_devices()
    cpu = replace(devices["cpu"], memory_bytes=memory, usable_bytes=memory)
    return Fleet({**devices, "cpu": cpu}, NodePool("cpu", 1, 1, "cpu", FAST, outside))


def least_step_s(config: RunConfig, fleet: Fleet, nodes: Sequence[NodePlaces]) -> float:
    """Of every degree that may be, placed by the simple planner on all workers."""
    costs, workers = TopologyCost(config, fleet, nodes), sum(node.places for node in nodes)
    found = []
    for mesh in product(range(1, workers + 1), (1, 2), range(1, workers + 1), range(1, 9)):
        if prod(mesh) > workers or mesh[3] not in (1, 2, 4):
            continue
        degrees = dict(zip(("pp", "dp_shard", "cp", "tp"), mesh, strict=True))
        try:
            layout = config.layout.model_dump() | degrees
            changed = RunConfig.model_validate(config.model_dump() | {"layout": layout})
            plan = plan_layout(changed, nodes, 1)
        except (ValueError, LayoutError):
            continue
        found.append(costs.cost(plan.topology).step_s)
    return min(found)


@pytest.mark.parametrize("seed", range(6))
def test_no_layout_of_all_workers_is_predicted_to_be_faster(seed: int) -> None:
    draw = random.Random(seed)
    config = run_of(model={"preset": draw.choice(["tiny", "small"]), "vocab_size": 2048})
    nodes = nodes_of(draw.randint(2, 6), draw.choice([1, 2, 4]))
    fleet = fleet_of(draw.choice([FAST, SLOW]))
    plan = SearchedPlanner(fleet, limit_s=inf)(config, nodes, 1)
    assert plan.step_s <= 1.02 * least_step_s(config, fleet, nodes)
    assert plan.idle_places == 0 or plan.idle_reason
    again = SearchedPlanner(fleet, limit_s=inf)(config, nodes, 1)
    assert again == plan, "the same input gives the same plan"


def test_a_layout_stays_if_another_one_is_hardly_faster() -> None:
    """Two replicas on three nodes: what is left of them stays where it is."""
    config, nodes = run_of(), nodes_of(4, 1)
    fleet = fleet_of()
    planner = SearchedPlanner(fleet, limit_s=inf)
    before = planner(config, nodes, 1).topology
    after = planner(config, without(nodes, "node00"), 2, PresentPlacement(before))
    assert after.topology.generation == 2
    fastest = planner(config, without(nodes, "node00"), 2)
    assert after.step_s <= 1.02 * fastest.step_s


def test_state_that_travels_long_keeps_the_present_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another layout has faster steps, and is worth its moves only if it stays for long."""
    config, nodes = run_of(layout={"pp": 2}), nodes_of(4, 2)
    before = plan_layout(config, nodes, 1).topology
    present = PresentPlacement(before)
    kept = TopologyCost(config, fleet_of(), nodes).cost(before).step_s
    moved = SearchedPlanner(fleet_of(), limit_s=inf)(config, nodes, 2, present)
    assert moved.step_s < 0.98 * kept
    assert moved.moved_bytes > 0
    monkeypatch.setattr(searched, "BETWEEN_CHANGES_S", 1e-3)
    plan = SearchedPlanner(fleet_of(), limit_s=inf)(config, nodes, 2, present)
    assert plan.topology.kinds == before.kinds
    assert plan.untouched_replicas == len(before.replicas)
    assert plan.moved_bytes == 0


def test_what_does_not_fit_is_cut_and_what_never_fits_is_refused() -> None:
    config, nodes = run_of(), nodes_of(4, 1)
    costs = TopologyCost(config, fleet_of(), nodes)
    whole = costs.cost(plan_layout(config, nodes, 1).topology).peak_bytes
    plan = SearchedPlanner(fleet_of(memory=0.8 * whole), limit_s=inf)(config, nodes, 1)
    assert plan.topology.kinds != (((1, 1, 1, 1), ()),)
    assert costs.cost(plan.topology).peak_bytes <= 0.8 * whole
    with pytest.raises(LayoutError, match="no layout of 4 workers fits: the nearest lacks"):
        SearchedPlanner(fleet_of(memory=whole / 100), limit_s=inf)(config, nodes, 1)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"task": {"name": "x:y"}}, "task.name=x:y"),
        ({"layout": {"replicas": [{"tp": 2}, {}]}}, "layout.replicas"),
        ({"layout": {"schedule": "pipedream", "pp": 2, "workers": 2}}, "layout.schedule=pipedream"),
    ],
)
def test_the_simple_planner_is_named_with_the_key(changes: dict[str, Any], key: str) -> None:
    config, nodes = run_of(**changes), nodes_of(3, 1)
    plan = SearchedPlanner(fleet_of(), limit_s=inf)(config, nodes, 1)
    assert plan.simple_because.startswith(key)
    assert plan.topology == plan_layout(config, nodes, 1).topology


def test_a_search_that_takes_too_long_ends_with_the_simple_planner() -> None:
    ticks = iter(range(1000))
    planner = SearchedPlanner(fleet_of(), limit_s=0.5, clock=lambda: float(next(ticks)))
    plan = planner(run_of(), nodes_of(3, 1), 1)
    assert plan.simple_because == "the search took more than 0.5 s"


def test_the_workers_of_slow_nodes_get_fewer_microbatches_in_the_prediction() -> None:
    config, nodes = run_of(), nodes_of(2, 1)
    slow = [nodes[0], replace(nodes[1], speed=0.5)]
    planner = SearchedPlanner(fleet_of(), limit_s=inf)
    assert planner(config, slow, 1).step_s > 1.2 * planner(config, nodes, 1).step_s


def _losses(config: RunConfig, seed: int) -> list[Topology]:
    """Topologies of a run that loses and gets nodes."""
    draw, nodes, found = random.Random(seed), nodes_of(6, 1), list[Topology]()
    planner, present = SearchedPlanner(fleet_of(draw.choice([FAST, SLOW])), limit_s=inf), None
    for generation in range(1, 6):
        there = draw.sample(nodes, draw.randint(2, 6))
        there.sort(key=lambda node: node.name)
        plan = planner(config, there, generation, present)
        assert set(plan.topology.nodes) <= {node.name for node in there}
        found.append(plan.topology)
        present = PresentPlacement(plan.topology)
    return found


def test_any_row_of_changes_can_be_planned() -> None:
    for seed in range(3):
        assert [t.generation for t in _losses(run_of(), seed)] == [1, 2, 3, 4, 5]


def test_a_likely_loss_gets_its_next_plan_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    config, nodes = run_of(), nodes_of(8, 2)
    planner = SearchedPlanner(fleet_of(), limit_s=inf, later=lambda work: work())
    before = planner(config, nodes, 1).topology
    expected = SearchedPlanner(fleet_of(), limit_s=inf)(
        config, without(nodes, "node01"), 2, PresentPlacement(before)
    )

    def no_search(*_: object) -> None:
        raise AssertionError("a search was made")

    monkeypatch.setattr(planner, "_later", lambda work: None)
    monkeypatch.setattr(planner, "_best", no_search)
    for name in ("node00", "node01", "node03"):
        left = without(nodes, name)
        found = planner(config, left, 2, PresentPlacement(before))
        assert set(found.topology.nodes) <= {node.name for node in left}
        assert found.step_s == pytest.approx(expected.step_s, rel=0.02)
    with pytest.raises(AssertionError, match="a search was made"):
        planner(config, nodes[:2], 2, PresentPlacement(before))


def test_likely_losses_are_nodes_racks_zones_and_half_of_spot_nodes() -> None:
    nodes = [
        replace(node, machine=Machine(node.name, rack=f"r{place // 2}", zone=f"z{place // 4}"))
        for place, node in enumerate(nodes_of(12, 2))
    ]
    assert [len(left) for left in nodes_left(nodes, is_spot=False)] == [5, 4, 2]
    assert [len(left) for left in nodes_left(nodes, is_spot=True)] == [5, 4, 2, 3]
    assert list(nodes_left(nodes[:1], is_spot=True)) == []

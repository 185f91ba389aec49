"""Any number of places on any nodes: every worker is used or the reason is said, and a change
touches little."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.config.run import RunConfig
from holdfast.core.sharding.reduction_tree import check_dealing
from holdfast.core.sharding.reshard_plan import plan_reshard
from holdfast.core.sharding.state_table import ITEM_BYTES, local_boxes, state_table
from holdfast.errors import LayoutError
from holdfast.layout import Replica, Topology
from holdfast.plan.placing.interface import LayoutPlan, NodePlaces, PresentPlacement
from holdfast.plan.placing.planner import dealer_of, plan_layout, reweight
from tests.support.marks import in_campaign

RUN_FILES: dict[str, dict[str, Any]] = {
    "dp": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "pp4": {"pp": 4},
    "gpipe": {"pp": 4, "schedule": "gpipe"},
    "pp2-tp2": {"pp": 2, "tp": 2},
    "shard2": {"dp_shard": 2},
    "shard3": {"dp_shard": 3},
    "shard4": {"dp_shard": 4},
    "pp2-shard4-tp2": {"pp": 2, "dp_shard": 4, "tp": 2},
}
SHAPE = {"preset": None, "dim": 32, "heads": 4, "kv_heads": 2, "ffn_dim": 32, "vocab_size": 64}
EIGHT_BLOCKS = SHAPE | {"layers": 8}
PARTS = (1, 2, 3, 4)  # places of a node


@cache
def run_file(name: str, microbatches: int = 8, workers: int = 0) -> RunConfig:
    return made(microbatches, {**RUN_FILES[name], "workers": workers})


def made(microbatches: int, layout: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(
        {
            "data": {"sequence_length": 16},
            "model": EIGHT_BLOCKS,
            "train": {"batch_size": 12 * microbatches, "microbatch_size": 12},
            "layout": layout,
        }
    )


def nodes_of(places: int, each: int) -> list[NodePlaces]:
    """So many places, `each` on a node and what is left on the last."""
    sizes = [each] * (places // each) + ([places % each] if places % each else [])
    return [NodePlaces(f"node{i:02}", size) for i, size in enumerate(sizes)]


def without(nodes: Sequence[NodePlaces], name: str) -> list[NodePlaces]:
    return [node for node in nodes if node.name != name]


def most(config: RunConfig, places: int, microbatches: int) -> int:
    """The most workers that any set of allowed replicas can use, by trying all."""
    layout = config.layout
    shapes = {
        (pp * shard * tp, pp if layout.schedule == "1f1b" else 1)
        for pp, shard, tp in product(
            range(1, layout.pp + 1), range(1, layout.dp_shard + 1), range(1, layout.tp + 1)
        )
        if 12 % shard == 0 and tp != 3
    }
    reached = {(0, 0)}
    new = reached
    while new:
        new = {
            (size + more, used + least)
            for size, used in new
            for more, least in shapes
            if size + more <= places and used + least <= microbatches
        } - reached
        reached |= new
    return max(size for size, _ in reached)


@pytest.mark.parametrize("numbers", [(2, 5, 8), in_campaign((3, 4, 6, 7))])
@pytest.mark.parametrize("name", RUN_FILES)
def test_every_worker_is_used_or_it_is_said_why_not(name: str, numbers: tuple[int, ...]) -> None:
    for microbatches, places in product(numbers, range(1, 13)):
        config = run_file(name, microbatches)
        best = most(config, places, microbatches)
        for each in PARTS:
            found = plan_layout(config, nodes_of(places, each), 3)
            assert found.topology.world_size == best, (microbatches, places, each)
            assert found.idle_places == places - best
            assert bool(found.idle_reason) == bool(found.idle_places)
            assert found.came_from == (None,) * best
            _whole_first(config, found.topology, places, microbatches)
            _dealt(config, found.topology, microbatches)
            _seated(found.topology, nodes_of(places, each))


def _whole_first(config: RunConfig, topology: Topology, places: int, microbatches: int) -> None:
    """As many of the run file's replicas as fit, where smaller ones use no more workers."""
    layout = config.layout
    shape = (layout.pp, layout.dp_shard, 1, layout.tp)
    least = layout.pp if layout.schedule == "1f1b" else 1
    whole = sum(replica.mesh_shape == shape for replica in topology.replicas)
    assert whole == min(places // layout.ranks, microbatches // least)


def _dealt(config: RunConfig, topology: Topology, microbatches: int) -> None:
    """Legal for every pipeline, and within a leaf of the proportion where that is."""
    replicas = topology.replicas
    shares = dealer_of(topology, config.layout.schedule)(microbatches, len(replicas))
    check_dealing(microbatches, shares)
    total = sum(replica.weight for replica in replicas)
    least = [r.degree("pp") if config.layout.schedule == "1f1b" else 1 for r in replicas]
    parts = [microbatches * replica.weight / total for replica in replicas]
    bound = any(part < few for part, few in zip(parts, least, strict=True))
    for share, part, few, replica in zip(shares, parts, least, replicas, strict=True):
        assert len(share) >= few
        assert replica.weight * topology.world_size == len(replica.ranks) * total
        if not bound:
            assert abs(len(share) - part) < 1


def _seated(topology: Topology, nodes: Sequence[NodePlaces]) -> None:
    for node in nodes:
        assert topology.nodes.count(node.name) <= node.places
    assert set(topology.nodes) <= {node.name for node in nodes}


def test_the_same_input_gives_the_same_plan_and_json_is_as_it_was() -> None:
    config = run_file("pp2-tp2")
    first, again = (plan_layout(config, nodes_of(8, 2), 4) for _ in range(2))
    assert first == again
    assert "weight" not in json.dumps(first.topology.to_json()), "equal replicas"
    unlike = plan_layout(config, nodes_of(7, 2), 4).topology
    assert [r.weight for r in unlike.replicas] == [4, 2, 1]
    assert Topology.from_json(unlike.to_json()) == unlike


def test_no_more_workers_than_the_run_file_names() -> None:
    for run, nodes in (("dp", 2), ("tp2", 3)):
        found = plan_layout(run_file(run, workers=6), nodes_of(9, 3), 1)
        assert (found.topology.world_size, found.idle_places) == (6, 3)
        assert found.idle_reason == "layout.workers asks for 6 workers"
        # a node is left over, unless a tensor group would have to span two nodes then
        assert len(set(found.topology.nodes)) == nodes


def test_too_few_microbatches_are_the_reason() -> None:
    found = plan_layout(run_file("dp", 2), nodes_of(5, 1), 1)
    assert found.topology.world_size == 2
    assert found.idle_reason == (
        "no replica of 3 workers or fewer can be added: a step has 2 microbatches, and every "
        "replica needs one for each stage"
    )


def test_replicas_lie_on_few_nodes_and_tp_on_one() -> None:
    found = plan_layout(run_file("pp2-tp2"), nodes_of(12, 3), 1).topology
    spread = [len({found.nodes[rank] for rank in r.ranks}) for r in found.replicas]
    assert spread == [2, 2, 2] or sorted(spread) == [2, 2, 4]
    first = found.replicas[0]
    for stage in range(2):
        pair = {found.nodes[first.rank_at(pp=stage, tp=tp)] for tp in range(2)}
        assert len(pair) == 1
    alone = plan_layout(run_file("shard4"), nodes_of(12, 4), 1).topology
    assert all(len({alone.nodes[rank] for rank in r.ranks}) == 1 for r in alone.replicas)


def test_unlike_replicas_of_the_run_file() -> None:
    config = made(8, {"replicas": [{"pp": 3}, {"dp_shard": 2}]})
    shapes = [r.mesh_shape for r in plan_layout(config, nodes_of(9, 1), 1).topology.replicas]
    assert shapes == [(3, 1, 1, 1), (1, 2, 1, 1)]
    assert (
        plan_layout(config, nodes_of(9, 1), 1).idle_reason == "layout.replicas asks for 5 workers"
    )
    for places in range(1, 6):
        assert plan_layout(config, nodes_of(places, 1), 1).topology.world_size == places
    before = plan_layout(config, nodes_of(5, 1), 1)
    after = plan_layout(
        config, without(nodes_of(5, 1), "node00"), 2, PresentPlacement(before.topology)
    )
    assert after.untouched_replicas == 1
    assert [r.mesh_shape for r in after.topology.replicas] == [(1, 2, 1, 1), (1, 2, 1, 1)]


def _changes(nodes: Sequence[NodePlaces]) -> Iterator[tuple[str, list[NodePlaces]]]:
    for node in nodes:
        yield node.name, without(nodes, node.name)


@pytest.mark.parametrize("name", ["dp", "tp2", "pp2-tp2", "shard4", in_campaign("pp4")])
@pytest.mark.parametrize("each", [1, in_campaign(2), 4])
def test_a_loss_touches_only_the_replicas_of_the_node(name: str, each: int) -> None:
    config = run_file(name)
    for places in range(2, 13):
        nodes = nodes_of(places, each)
        before = plan_layout(config, nodes, 1)
        for gone, left in _changes(nodes) if len(nodes) > 1 else ():
            after = plan_layout(config, left, 2, PresentPlacement(before.topology))
            hit = [r for r in before.topology.replicas if _is_on(before.topology, r, gone)]
            whole = [r for r in before.topology.replicas if r not in hit and _named(config, r)]
            assert after.untouched_replicas >= len(whole)
            _came_from_there(before.topology, after, lost=gone)
            back = plan_layout(config, nodes, 3, PresentPlacement(after.topology))
            assert back.topology.world_size == before.topology.world_size
            _came_from_there(after.topology, back)
            _stay_in_order(after.topology, back)


def _is_on(topology: Topology, replica: Replica, node: str) -> bool:
    return any(topology.nodes[rank] == node for rank in replica.ranks)


def _named(config: RunConfig, replica: Replica) -> bool:
    layout = config.layout
    return replica.mesh_shape == (layout.pp, layout.dp_shard, 1, layout.tp)


def _came_from_there(before: Topology, after: LayoutPlan, lost: str = "") -> None:
    """A process stays on its node, and is one process."""
    was = [rank for rank in after.came_from if rank is not None]
    assert len(set(was)) == len(was)
    for rank, old in enumerate(after.came_from):
        if old is not None:
            assert after.topology.nodes[rank] == before.nodes[old] != lost


def _stay_in_order(before: Topology, after: LayoutPlan) -> None:
    """Replicas that are untouched keep their kind, their workers and their order."""
    by_ranks = {replica.ranks: replica for replica in before.replicas}
    stayed = [
        by_ranks[was]
        for replica in after.topology.replicas
        if (was := tuple(after.came_from[rank] for rank in replica.ranks)) in by_ranks
        and by_ranks[was].kind == replica.kind
    ]
    assert len(stayed) == after.untouched_replicas
    assert [replica.index for replica in stayed] == sorted(replica.index for replica in stayed)


def test_nothing_changes_where_nothing_has_changed() -> None:
    for name, places in product(RUN_FILES, (1, 4, 7, 12)):
        before = plan_layout(run_file(name), nodes_of(places, 2), 1)
        after = plan_layout(
            run_file(name), nodes_of(places, 2), 2, PresentPlacement(before.topology)
        )
        assert after.topology.replicas == before.topology.replicas
        assert after.came_from == tuple(range(before.topology.world_size))
        assert (after.moved_bytes, after.untouched_replicas) == (0, len(before.topology.replicas))


def test_a_worker_that_is_lost_on_a_node_that_stays_is_replaced_there() -> None:
    config, nodes = run_file("shard4"), nodes_of(8, 4)
    before = plan_layout(config, nodes, 1)
    after = plan_layout(config, nodes, 2, PresentPlacement(before.topology, frozenset({5})))
    assert after.came_from == (0, 1, 2, 3, 4, None, 6, 7)
    assert after.topology.replicas == before.topology.replicas
    assert after.topology.nodes == before.topology.nodes


def test_what_is_missing_comes_from_whoever_holds_it() -> None:
    """Two replicas lose opposite halves: what is left of both makes one, and nothing moves."""
    config, nodes = run_file("shard2"), nodes_of(4, 1)
    before = plan_layout(config, nodes, 1)
    after = plan_layout(config, nodes, 2, PresentPlacement(before.topology, frozenset({1, 2})))
    left = [node for node in nodes if node.name in ("node00", "node03")]
    fewer = plan_layout(config, left, 2, PresentPlacement(before.topology))
    assert fewer.came_from == (0, 3)
    assert (fewer.moved_bytes, fewer.untouched_replicas) == (0, 0)
    assert after.came_from == (0, None, None, 3)


def test_places_of_slow_nodes_are_left_idle_and_slow_replicas_get_less() -> None:
    slow = [NodePlaces("a", 1, 0.5), NodePlaces("b", 1), NodePlaces("c", 1)]
    two = plan_layout(run_file("dp", workers=2), slow, 1).topology
    assert two.nodes == ("b", "c")
    three = plan_layout(run_file("dp"), slow, 1).topology
    assert {three.nodes[r.ranks[0]]: r.weight for r in three.replicas} == {"a": 1, "b": 2, "c": 2}
    again = reweight(three, {0: 0.25})
    assert [r.weight for r in again.replicas] == [1, 4, 4]


@pytest.mark.parametrize("zero", [1, 3])
def test_a_worker_holds_no_more_than_it_may(zero: int) -> None:
    config = made(8, {"dp_shard": 4, "zero": zero})
    whole = max(_state_bytes(config, plan_layout(config, nodes_of(1, 1), 1).topology))
    two = plan_layout(config, nodes_of(7, 1), 1, memory=whole)
    for replica in two.topology.replicas:
        assert len(replica.ranks) > 1, "one worker would hold parameters, moments and gradients"
    assert two.topology.world_size >= 6
    with pytest.raises(LayoutError, match=r"a worker|workers of a replica holds"):
        plan_layout(config, nodes_of(4, 1), 1, memory=whole // 100)
    with pytest.raises(LayoutError, match=r"the smallest replica within .* needs \d workers"):
        plan_layout(config, nodes_of(1, 1), 1, memory=whole)


def _state_bytes(config: RunConfig, topology: Topology) -> list[int]:
    table = state_table(config.model)
    return [
        sum(b.size * ITEM_BYTES[s.dtype] for s, b in zip(table, boxes, strict=True))
        for rank in range(topology.world_size)
        for boxes in (local_boxes(topology, table, rank),)
    ]


def test_what_cannot_be_run_is_one_sentence() -> None:
    with pytest.raises(LayoutError) as caught:
        plan_layout(run_file("dp"), [], 1)
    assert str(caught.value) == ("layout.workers: there is no place for a worker; wait for a node")


@settings(max_examples=20, deadline=None)
@given(name=st.sampled_from(list(RUN_FILES)), data=st.data())
def test_any_history_of_losses_and_returns(name: str, data: st.DataObject) -> None:
    """Whatever happened before: all workers are used, and the moves of a live rebuild exist
    wherever somebody still holds the whole state."""
    config = run_file(name)
    everywhere = [
        NodePlaces(f"node{i}", places)
        for i, places in enumerate(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=5)))
    ]
    present: PresentPlacement | None = None
    for generation in range(1, 5):
        there = data.draw(st.lists(st.sampled_from(everywhere), min_size=1, unique=True))
        found = plan_layout(config, there, generation, present)
        places = sum(node.places for node in there)
        assert found.topology.world_size == most(config, places, 8)
        _seated(found.topology, there)
        _dealt(config, found.topology, 8)
        if present is not None:
            _came_from_there(present.topology, found)
            _stay_in_order(present.topology, found)
            assert not {was for was in found.came_from if was is not None} & present.lost_ranks
            if found.untouched_replicas:
                moves = plan_reshard(
                    present.topology, found.topology, state_table(config.model), found.came_from, 0
                )
                assert moves.rank == 0
        lost = data.draw(st.frozensets(st.integers(0, found.topology.world_size - 1), max_size=2))
        present = PresentPlacement(found.topology, lost)


def test_the_bytes_to_move_are_about_those_of_the_moves() -> None:
    config = run_file("pp2-tp2")
    nodes = nodes_of(8, 1)
    before = plan_layout(config, nodes, 1)
    after = plan_layout(config, nodes[1:], 2, PresentPlacement(before.topology))
    table = state_table(config.model)
    item = {spec.name: ITEM_BYTES[spec.dtype] for spec in table}
    sent = sum(
        move.box.size * item[move.box.name]
        for rank in range(after.topology.world_size)
        for move in plan_reshard(
            before.topology, after.topology, table, after.came_from, rank
        ).receives
    )
    assert sent > 0
    assert 0.5 < after.moved_bytes / sent < 2

"""What survivors hold between them."""

from __future__ import annotations

import json
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config.sections.model import ModelConfig
from holdfast.core.sharding.reshard_plan import plan_reshard
from holdfast.core.sharding.state_table import state_table
from holdfast.errors import LayoutError
from holdfast.layout import Layout, Topology, place_layout, place_replicas
from holdfast.policy.recovery.rank_assignment import assign_ranks
from holdfast.policy.recovery.survivors import (
    HeldState,
    ResumePoint,
    first_missing_tensor,
    resume_point,
)

MODEL = ModelConfig(preset=None, layers=2, dim=8, heads=2, kv_heads=2, ffn_dim=8, vocab_size=32)
TABLE = state_table(MODEL)
LAYOUTS = [
    [Layout(dp_replicate=3)],
    [Layout(dp_shard=3)],
    [Layout(tp=2)],
    [Layout(pp=2, stages=(1, 1))],
    [Layout(dp_replicate=2, dp_shard=2)],
    [Layout(dp_replicate=2, tp=2)],
    [Layout(tp=2), Layout(dp_shard=2)],
    [Layout(dp_shard=2), Layout(pp=2, stages=(1, 1))],
]


@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
def test_the_whole_state_is_there_exactly_where_it_could_be_moved(layouts: list[Layout]) -> None:
    """Against the plan of moves to one single rank, which says what nobody holds."""
    world = sum(layout.world_size for layout in layouts)
    old = place_replicas(layouts, 1, ("a",) * world)
    for count in range(1, world + 1):
        for left in combinations(range(world), count):
            new = place_layout(Layout(dp_replicate=count), 2, ("a",) * count)
            try:
                plan_reshard(old, new, TABLE, list(left), 0)
                movable = True
            except LayoutError:
                movable = False
            assert (first_missing_tensor(old, TABLE, left) is None) == movable, left


def _held(*steps: int | tuple[int, int], torn: tuple[int, ...] = ()) -> dict[int, HeldState]:
    out = {}
    for rank, step in enumerate(steps):
        applied, gradient = step if isinstance(step, tuple) else (step, None)
        out[rank] = HeldState(1, rank, applied, gradient, rank in torn)
    return out


REPLICAS = place_layout(Layout(dp_replicate=3), 1, ("a",) * 3)
SHARDS = place_layout(Layout(dp_shard=3), 1, ("a",) * 3)


def test_they_go_on_from_the_newest_step_that_somebody_applied() -> None:
    assert resume_point(REPLICAS, TABLE, _held(4, 4)) == ResumePoint(4, frozenset({0, 1}))
    assert resume_point(REPLICAS, TABLE, _held(4, (3, 4))) == ResumePoint(4, frozenset({0, 1}))
    # Who has neither the state nor the gradient is a newcomer.
    assert resume_point(REPLICAS, TABLE, _held(4, 3)) == ResumePoint(4, frozenset({0}))


def test_a_torn_state_is_none() -> None:
    assert resume_point(REPLICAS, TABLE, _held(4, 5, torn=(1,))) == ResumePoint(4, frozenset({0}))
    assert resume_point(REPLICAS, TABLE, _held(4, torn=(0,))) == "nobody is left who holds a state"
    assert resume_point(REPLICAS, TABLE, {}) == "nobody is left who holds a state"


def test_what_was_sharded_over_the_lost_one_has_to_be_restored() -> None:
    assert resume_point(SHARDS, TABLE, _held(4, 4, 4)) == ResumePoint(4, frozenset({0, 1, 2}))
    for held in (_held(4, 4), _held(4, 4, 3), _held(4, 4, 4, torn=(2,))):
        found = resume_point(SHARDS, TABLE, held)
        assert isinstance(found, str)
        assert "nobody who is left holds the whole of model." in found
    assert resume_point(SHARDS, TABLE, _held(4, (3, 4), (3, 4))) == ResumePoint(
        4, frozenset({0, 1, 2})
    )


def test_what_is_held_travels_as_json() -> None:
    held = HeldState(3, 1, 7, 8, False, "error", "ValueError: no", (2, 0))
    value = json.loads(json.dumps(held.to_json()))
    assert HeldState.from_json(value | {"of a newer version": 1}) == held
    bare = {"generation": 1, "rank": 0, "applied": 2}
    assert HeldState.from_json(bare) == HeldState(1, 0, 2, state=(1, 0))
    assert HeldState.from_json(bare | {"torn": True}) == HeldState(1, 0, 2, torn=True)
    assert HeldState.from_json(bare | {"state": None}) == HeldState(1, 0, 2, torn=True)
    with pytest.raises((KeyError, TypeError, ValueError)):
        HeldState.from_json({"generation": 1, "rank": None, "applied": 2})


# --- which process becomes which rank -------------------------------------------------------------
ONE = "a"


def _on(layout: Layout, generation: int, *nodes: str) -> Topology:
    return place_layout(layout, generation, nodes or (ONE,) * layout.world_size)


def _pids(*ranks: int) -> dict[int, int]:
    return {rank: 100 + rank for rank in ranks}


def test_those_who_stay_keep_their_ranks_and_a_newcomer_takes_the_lost_one() -> None:
    old, new = _on(Layout(dp_replicate=3), 1), _on(Layout(dp_replicate=3), 2)
    found = assign_ranks(old, new, _pids(0, 2), {0, 2})
    assert found.processes == (100, None, 102)
    assert found.came_from == (0, None, 2)


def test_a_process_without_a_state_stays_and_came_from_nowhere() -> None:
    old, new = _on(Layout(dp_replicate=3), 1), _on(Layout(dp_replicate=3), 2)
    found = assign_ranks(old, new, _pids(0, 1, 2), {0, 2})
    assert found.processes == (100, 101, 102)
    assert found.came_from == (0, None, 2)


def test_of_fewer_replicas_a_whole_one_goes_on_untouched() -> None:
    """Rank 0 is lost: replica 1 (ranks 2 and 3) becomes replica 0 as it is."""
    old, new = _on(Layout(dp_replicate=2, tp=2), 1), _on(Layout(tp=2), 2)
    found = assign_ranks(old, new, _pids(1, 2, 3), {1, 2, 3})
    assert found.processes == (102, 103)
    assert found.came_from == (2, 3)


def test_a_whole_replica_keeps_its_number_where_it_can() -> None:
    old = new = _on(Layout(dp_replicate=2, dp_shard=2), 1)
    found = assign_ranks(old, new, _pids(0, 2, 3), {0, 2, 3})
    assert found.processes == (100, None, 102, 103)


def test_nobody_changes_its_node() -> None:
    old = _on(Layout(dp_replicate=4), 1, "a", "a", "b", "b")
    new = _on(Layout(dp_replicate=3), 2, "b", "b", "a")
    found = assign_ranks(old, new, _pids(0, 1, 2), {0, 1, 2})
    assert found.processes == (102, None, 100)
    assert found.came_from == (2, None, 0)


def test_another_shape_takes_whoever_is_there() -> None:
    old = _on(Layout(dp_shard=3), 1)
    new = place_replicas([Layout(dp_shard=2)], 2, (ONE, ONE))
    found = assign_ranks(old, new, _pids(0, 2), {0, 2})
    assert found.processes == (100, 102)
    assert found.came_from == (0, 2)


SHAPES = st.sampled_from(
    [
        Layout(dp_replicate=1),
        Layout(dp_replicate=3),
        Layout(dp_replicate=2, tp=2),
        Layout(dp_shard=2),
        Layout(dp_replicate=2, dp_shard=2),
        Layout(pp=2, tp=2, stages=(1, 1)),
    ]
)


@given(SHAPES, SHAPES, st.data())
def test_each_process_sits_once_and_nobody_stands_who_could_sit(
    before: Layout, after: Layout, data: st.DataObject
) -> None:
    names = st.sampled_from(["a", "b"])
    old, new = (
        place_layout(layout, number, tuple(data.draw(names) for _ in range(layout.world_size)))
        for number, layout in ((1, before), (2, after))
    )
    living = data.draw(st.sets(st.integers(0, old.world_size - 1)))
    holding = data.draw(st.sets(st.sampled_from(sorted(living)))) if living else set()
    found = assign_ranks(old, new, _pids(*living), holding)
    seated = [pid for pid in found.processes if pid is not None]
    assert len(set(seated)) == len(seated)
    for rank, (pid, was) in enumerate(zip(found.processes, found.came_from, strict=True)):
        if was is not None:
            assert was in holding
            assert pid == 100 + was
        if pid is not None:
            assert old.nodes[pid - 100] == new.nodes[rank]
    for node in ("a", "b"):
        free = sum(new.nodes[r] == node for r, pid in enumerate(found.processes) if pid is None)
        standing = sum(old.nodes[w] == node for w in living if 100 + w not in seated)
        assert not (free and standing)

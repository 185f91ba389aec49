"""Which process becomes which rank: examples by hand, and what holds for all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.layout import Layout, Topology, place_layout, place_replicas
from holdfast.policy.recovery.rank_assignment import assign_ranks

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


LAYOUTS = st.sampled_from(
    [
        Layout(dp_replicate=1),
        Layout(dp_replicate=3),
        Layout(dp_replicate=2, tp=2),
        Layout(dp_shard=2),
        Layout(dp_replicate=2, dp_shard=2),
        Layout(pp=2, tp=2, stages=(1, 1)),
    ]
)


@given(LAYOUTS, LAYOUTS, st.data())
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

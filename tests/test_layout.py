"""Layout and Topology: where ranks sit, what each stage holds, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from holdfast.errors import LayoutError
from holdfast.layout import (
    Layout,
    Replica,
    Topology,
    coordinates_of,
    index_of,
    place_layout,
    place_replicas,
)


def nodes(count: int) -> tuple[str, ...]:
    return tuple(f"node{rank // 4}" for rank in range(count))


def test_ranks_fill_replica_by_replica_in_mesh_order() -> None:
    topo = place_layout(Layout(dp_replicate=2, pp=2, dp_shard=2, tp=2, stages=(2, 1)), 5, nodes(16))
    assert topo.world_size == 16
    assert [r.index for r in topo.replicas] == [0, 1]
    here = topo.coordinate(13)
    assert (here.replica, here.mesh_rank) == (1, 5)
    assert (here.pp, here.dp_shard, here.cp, here.tp) == (1, 0, 0, 1)
    for rank in range(16):
        at, replica = topo.coordinate(rank), topo.replica_of(rank)
        assert replica.rank_at(at.pp, at.dp_shard, at.cp, at.tp) == rank
        assert (
            index_of(coordinates_of(at.mesh_rank, replica.mesh_shape), replica.mesh_shape)
            == at.mesh_rank
        )


def test_stages_hold_blocks_in_order_and_the_ends() -> None:
    replica = Replica(0, (0, 1, 2), (3, 1, 1, 1), (1, 2, 2))
    assert [replica.blocks(pp) for pp in range(3)] == [(0,), (1, 2), (3, 4)]
    assert [replica.holder_of(p) for p in range(-1, 6)] == [0, 0, 1, 1, 2, 2, 2]
    alone = Replica(0, (0,))
    assert alone.blocks(0) is None
    assert {alone.holder_of(p) for p in range(-1, 6)} == {0}


def test_several_stages_go_round_the_ranks_or_down_and_up_again() -> None:
    round_ranks = Replica(0, (0, 1), (2, 1, 1, 1), (1, 2, 1, 1))
    assert [round_ranks.blocks(pp) for pp in range(2)] == [(0, 3), (1, 2, 4)]
    assert round_ranks.last_pp == 1
    folded = Replica(0, (0, 1), (2, 1, 1, 1), (1, 2, 1, 1), is_folded=True)
    assert [folded.blocks(pp) for pp in range(2)] == [(0, 4), (1, 2, 3)]
    assert [folded.stages_at(pp) for pp in range(2)] == [(0, 3), (1, 2)]
    assert [folded.holder_of(p) for p in (-1, 0, 3, 4, 5)] == [0, 0, 1, 0, 0]
    topo = place_replicas((Layout(pp=2, stages=(1, 2, 1, 1), is_folded=True),), 1, nodes(2))
    assert Topology.from_json(json.loads(json.dumps(topo.to_json()))) == topo
    with pytest.raises(LayoutError, match="give 4 numbers of blocks"):
        Layout(pp=2, stages=(2, 2), is_folded=True)


def test_a_pipeline_without_planned_stages_has_no_blocks() -> None:
    replica = Replica(0, (0, 1), (2, 1, 1, 1))
    for ask in (lambda: replica.blocks(1), lambda: replica.holder_of(0)):
        with pytest.raises(LayoutError, match="which blocks each holds"):
            ask()


def test_unlike_replicas_stand_side_by_side() -> None:
    topo = place_replicas(
        (Layout(pp=3, stages=(1, 2, 1)), Layout(dp_replicate=2, tp=2)), 2, nodes(7)
    )
    assert [r.ranks for r in topo.replicas] == [(0, 1, 2), (3, 4), (5, 6)]
    assert topo.kinds == (((3, 1, 1, 1), (1, 2, 1)), ((1, 1, 1, 2), ()))
    assert topo.coordinate(6).tp == 1
    again = Topology.from_json(json.loads(json.dumps(topo.to_json())))
    assert again == topo


def test_a_topology_without_a_pipeline_reads_and_writes_as_before() -> None:
    topo = place_layout(Layout(dp_replicate=2), 1, nodes(2))
    assert topo.to_json()["replicas"][1] == {"index": 1, "ranks": [1], "mesh_shape": [1, 1, 1, 1]}
    assert Topology.from_json(topo.to_json()) == topo


def test_a_weight_is_written_where_it_is_not_one() -> None:
    even = place_layout(Layout(dp_replicate=2), 4, nodes(2))
    uneven = replace(even, replicas=(even.replicas[0], replace(even.replicas[1], weight=3)))
    first, second = uneven.to_json()["replicas"]
    assert "weight" not in first
    assert second["weight"] == 3
    assert Topology.from_json(json.loads(json.dumps(uneven.to_json()))) == uneven
    assert uneven.replicas[1].kind == even.replicas[1].kind
    with pytest.raises(LayoutError, match="replica 1: the weight 0 gives no work; use 1 or more"):
        replace(even.replicas[1], weight=0)


def refused(*replicas: Replica, world: int | None = None) -> str:
    count = sum(len(r.ranks) for r in replicas) if world is None else world
    with pytest.raises(LayoutError) as caught:
        Topology(1, replicas, nodes(count))
    text = str(caught.value)
    assert "\n" not in text
    assert caught.value.remedy
    return text


def test_impossible_topologies_are_refused_with_a_sentence() -> None:
    pair = (1, 2, 1, 1)
    assert "rank 1 stands twice, in replica 0 and in replica 1" in refused(
        Replica(0, (0, 1), pair), Replica(1, (1, 2), pair)
    )
    assert "rank 3 stands twice, in replica 0" in refused(Replica(0, (3, 3), pair))
    assert "ranks [1, 2] are missing" in refused(Replica(0, (0, 3), pair))
    assert "ranks [1, 2, 3] and more are missing" in refused(Replica(0, (0, 10**15), pair))
    assert "ranks [-1] are negative" in refused(Replica(0, (0, -1), pair))
    assert "2 ranks, but nodes for 3" in refused(Replica(0, (0, 1), pair), world=3)
    assert "replicas are numbered [0, 2]" in refused(Replica(0, (0,)), Replica(2, (1,)))
    assert "replicas are numbered []" in refused()


def test_blocks_must_agree_between_replicas() -> None:
    line = (2, 1, 1, 1)
    text = refused(
        Replica(0, (0, 1), line, (2, 2)), Replica(1, (2,)), Replica(2, (3, 4), line, (2, 1))
    )
    assert "the stages of replica 2 hold 3 blocks, those of replica 0 4" in text


def test_impossible_stages_are_refused() -> None:
    for make in (
        lambda s: Layout(pp=3, stages=s),
        lambda s: Replica(0, (0, 1, 2), (3, 1, 1, 1), s),
    ):
        with pytest.raises(LayoutError, match=r"pipeline of 3 cannot have the stages \(1, 2\)"):
            make((1, 2))
        with pytest.raises(LayoutError, match=r"stage 1 .* holds 0 blocks"):
            make((1, 0, 2))
        with pytest.raises(LayoutError, match=r"stage 0 .* holds 0 blocks"):
            make((0, 1, 2))
        with pytest.raises(LayoutError, match=r"stage 2 .* holds 0 blocks"):
            make((2, 1, 0))
        with pytest.raises(LayoutError, match=r"stage 2 .* holds -1 blocks"):
            make((1, 1, -1))
    with pytest.raises(LayoutError, match=r"the stages \(4,\)"):
        Layout(pp=2, stages=(4,))


def test_impossible_degrees_and_meshes_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"layout\.tp: degree 0 is impossible"):
        Layout(tp=0)
    with pytest.raises(LayoutError, match="2 ranks do not fill a mesh"):
        Replica(0, (0, 1), (1, 3, 1, 1))
    with pytest.raises(LayoutError, match="is not a mesh over"):
        Replica(0, (0, 1), (2,))
    with pytest.raises(LayoutError, match="needs 5 ranks, there are 4"):
        place_replicas((Layout(tp=2), Layout(dp_replicate=3)), 1, nodes(4))
    with pytest.raises(LayoutError, match="rank 4 is not in a world of 4"):
        place_layout(Layout(4), 1, nodes(4)).coordinate(4)
    with pytest.raises(LayoutError, match="is not in a mesh of"):
        Replica(0, (0,)).rank_at(pp=1)

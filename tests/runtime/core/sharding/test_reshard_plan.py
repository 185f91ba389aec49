"""Plans of a rebuild on random layouts: played out on arrays, every element arrives once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.sharding.boxes import Box, whole_box
from holdfast.core.sharding.reshard_plan import ReshardPlan, plan_reshard
from holdfast.core.sharding.state_table import ITEM_BYTES, TensorSpec, local_boxes
from holdfast.errors import LayoutError
from holdfast.layout import Layout, Replica, Topology, place_layout

Array = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
State = dict[str, Array]

TABLE = (
    TensorSpec("wide", "F64", (5, 7), 0),
    TensorSpec("flat", "F32", (11,), 0),
    TensorSpec("columns", "F32", (3, 8), 1),
    TensorSpec("short", "F32", (2, 3), 0),
    TensorSpec("scalar", "F32", ()),
    TensorSpec("alike", "BF16", (4, 4)),
    TensorSpec("heads", "F32", (8, 3), 0, 0, 4, (0,)),  # of the first block
    TensorSpec("out", "F32", (3, 8), 0, 1, 4, (1,)),  # columns by tp, rows by dp_shard
    TensorSpec("few", "F32", (4, 3), 0, 0, 2, (2,)),  # two units, held twice by four tp ranks
    TensorSpec("tied", "F64", (9, 2), 0, 0, 9, (-1, 3)),  # on the first and the last stage
)


def cut(box: Box, held: Box) -> tuple[slice, ...]:
    """Where `box` lies in an array that holds `held`."""
    return tuple(
        slice(a - o, a - o + n)
        for a, n, o in zip(box.offsets, box.lengths, held.offsets, strict=True)
    )


def whole_state() -> State:
    return {s.name: np.arange(int(np.prod(s.shape, dtype=int))).reshape(s.shape) for s in TABLE}


def spread(topology: Topology, rank: int) -> State:
    """What `rank` holds; boxes without elements are left out."""
    full = whole_state()
    boxes = local_boxes(topology, TABLE, rank)
    return {
        b.name: full[b.name][cut(b, whole_box(b.name, full[b.name].shape))] for b in boxes if b.size
    }


def play(
    old: Topology, new: Topology, came_from: Sequence[int | None], plans: Sequence[ReshardPlan]
) -> list[Counter[str]]:
    """Carry the plans out; per new rank, how many elements of each tensor were written.

    Asserts that what is read is held there, that both ends plan the same messages, and that
    every element that is wanted is written once, with its value.
    """
    held = [{} if was is None else spread(old, was) for was in came_from]
    boxes = [
        {} if was is None else {b.name: b for b in local_boxes(old, TABLE, was)}
        for was in came_from
    ]
    sent = {(t.source, t.target, t.number): t for m in plans for t in m.sends}
    due = {(t.source, t.target, t.number): t for m in plans for t in m.receives}
    assert sent == due
    written: list[Counter[str]] = []
    for rank, plan in enumerate(plans):
        wanted = {b.name: b for b in local_boxes(new, TABLE, rank) if b.size}
        out = {name: np.full(b.lengths, -1) for name, b in wanted.items()}
        counts: Counter[str] = Counter()
        for source, box in [(rank, b) for b in plan.copies] + [
            (t.source, t.box) for t in plan.receives
        ]:
            assert boxes[source][box.name].contains(box)
            value = held[source][box.name][cut(box, boxes[source][box.name])]
            place_ = cut(box, wanted[box.name])
            assert (out[box.name][place_] == -1).all(), f"{box} arrived twice"
            out[box.name][place_] = value
            counts[box.name] += box.size
        for t in plan.receives:
            had = boxes[rank].get(t.box.name)
            assert had is None or had.intersect(t.box) is None, f"{t.box} was there already"
        for name, value in spread(new, rank).items():
            np.testing.assert_array_equal(out[name], value)
        written.append(counts)
    return written


STAGES = {1: ((),), 2: ((1, 2), (2, 1)), 3: ((1, 1, 1),)}
"""Pipelines of three blocks, by their degree."""
MANY = 24  # ranks: two whole replicas of pp 3, tp 4, or three small ones


@st.composite
def topologies(draw: st.DrawFn, generation: int) -> Topology:
    """One to three replicas, each of a shape of its own, ranks shuffled, two nodes. A replica that
    would make it too many ranks is left out: to play that takes long and shows no more."""
    shapes = []
    for _ in range(draw(st.integers(1, 3))):
        pp, dp_shard, tp = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
        shapes.append(((pp, dp_shard, 1, tp), draw(st.sampled_from(STAGES[pp]))))
    sizes = [prod(shape) for shape, _ in shapes]
    while len(sizes) > 1 and sum(sizes) > MANY:
        sizes.pop()
        shapes.pop()
    order = draw(st.permutations(range(sum(sizes))))
    starts = accumulate(sizes, initial=0)
    replicas = tuple(
        Replica(i, tuple(order[start : start + prod(shape)]), shape, stages)
        for i, (start, (shape, stages)) in enumerate(zip(starts, shapes, strict=False))
    )
    nodes = draw(st.lists(st.sampled_from(("a", "b")), min_size=len(order), max_size=len(order)))
    return Topology(generation, replicas, tuple(nodes))


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_every_element_arrives_once_and_only_where_it_is_not_held(data: st.DataObject) -> None:
    old, new = data.draw(topologies(1)), data.draw(topologies(2))
    pool = [*range(old.world_size), *[None] * new.world_size]
    came_from = data.draw(st.permutations(pool))[: new.world_size]
    limit = data.draw(st.sampled_from([1, 16, 40, 1 << 20]))
    window = data.draw(st.sampled_from([16, 100, 1 << 20]))

    def plan(me: int) -> ReshardPlan:
        return plan_reshard(old, new, TABLE, came_from, me, limit=limit, window=window)

    lost = _lost(old, came_from)
    if lost:  # the new topology has at least one replica, which wants every element
        with pytest.raises(LayoutError, match="|".join(lost)):
            plan(0)
        return
    plans = [plan(me) for me in range(new.world_size)]
    play(old, new, came_from, plans)
    assert len({(m.digest, m.rounds) for m in plans}) == 1
    _check_rounds(plans, window)


def _lost(old: Topology, came_from: Sequence[int | None]) -> list[str]:
    """Names of the tensors of which some element is held by nobody who stayed."""
    left = {name: np.ones(value.shape, bool) for name, value in whole_state().items()}
    for was in came_from:
        for box in () if was is None else local_boxes(old, TABLE, was):
            if box.size:
                left[box.name][cut(box, whole_box(box.name, left[box.name].shape))] = False
    return [name for name, mask in left.items() if mask.any()]


def _check_rounds(plans: Sequence[ReshardPlan], window: int) -> None:
    item = {s.name: ITEM_BYTES[s.dtype] for s in TABLE}
    for plan in plans:
        flying: Counter[int] = Counter()
        number: Counter[int] = Counter()
        for t in (*plan.sends, *plan.receives):
            flying[t.round] += t.box.size * item[t.box.name]
            number[t.round] += 1
            assert t.round < plan.rounds
        assert all(n <= window or number[r] == 1 for r, n in flying.items())
        assert [t.round for t in plan.sends] == sorted(t.round for t in plan.sends)
        assert [t.round for t in plan.receives] == sorted(t.round for t in plan.receives)


def test_ranks_that_stay_where_they_are_send_nothing() -> None:
    old = place_layout(Layout(dp_replicate=2, dp_shard=2), 1, ("n",) * 4)
    new = place_layout(Layout(dp_replicate=2, dp_shard=2), 2, ("n",) * 4)
    for me in range(4):
        plan = plan_reshard(old, new, TABLE, range(4), me)
        assert (plan.sends, plan.receives, plan.rounds) == ((), (), 0)
        assert sum(b.size for b in plan.copies) == sum(b.size for b in local_boxes(new, TABLE, me))


def test_a_newcomer_is_served_by_its_own_node() -> None:
    old = place_layout(Layout(dp_replicate=4), 1, ("a", "a", "b", "b"))
    new = place_layout(Layout(dp_replicate=6), 2, ("a", "a", "b", "b", "a", "b"))
    came_from = (0, 1, 2, 3, None, None)
    for me, near in ((4, {0, 1}), (5, {2, 3})):
        assert {t.source for t in plan_reshard(old, new, TABLE, came_from, me).receives} == near


def test_holders_share_the_sending_evenly_by_bytes() -> None:
    """One large tensor, three holders, one newcomer: no holder sends much more than its third."""
    table = (TensorSpec("large", "F32", (3000, 10), 0),)
    old = place_layout(Layout(dp_replicate=3), 1, ("n",) * 3)
    new = place_layout(Layout(dp_replicate=4), 2, ("n",) * 4)
    sent = [
        sum(
            t.box.size for t in plan_reshard(old, new, table, (0, 1, 2, None), me, limit=4000).sends
        )
        for me in range(3)
    ]
    assert sum(sent) == 30000
    assert max(sent) - min(sent) <= 1000


def test_a_tensor_that_nobody_holds_any_more_is_named() -> None:
    old = place_layout(Layout(dp_shard=2), 1, ("n",) * 2)
    new = place_layout(Layout(), 2, ("n",))
    with pytest.raises(LayoutError, match=r"wide.*restore"):
        plan_reshard(old, new, TABLE, (0,), 0)


@pytest.mark.parametrize("came_from", [(0,), (0, 0), (0, 2), (0, -1)])
def test_came_from_must_fit_the_topologies(came_from: tuple[int, ...]) -> None:
    pair = place_layout(Layout(dp_replicate=2), 1, ("n",) * 2)
    with pytest.raises(LayoutError, match="came_from"):
        plan_reshard(pair, pair, TABLE, came_from, 0)

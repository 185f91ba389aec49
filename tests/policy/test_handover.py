"""From a notice to a planned move: whatever is planned is in time, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.config.model import ModelConfig
from holdfast.layout import Layout, Topology, place
from holdfast.policy.emergency import MARGIN, Route
from holdfast.policy.handover import SOON, Handover, Kept, Known, Links, Pace, Stays, Way, handover
from holdfast.spec.boxes import coverage
from holdfast.spec.ownership import owned_boxes
from holdfast.spec.state import StateTable, TensorSpec, local_boxes, state_table

MODEL = ModelConfig.model_validate({"preset": None, "layers": 2, "dim": 16, "heads": 2,
    "kv_heads": 1, "ffn_dim": 16, "vocab_size": 32})  # fmt: skip
TABLE = state_table(MODEL)
STATE = sum(spec.nbytes for spec in TABLE)
STEP = 7


def _fits(nodes: frozenset[str]) -> int | None:
    return 0 if nodes else None


def plan(
    topology: Topology, going: Mapping[str, float], *, table: StateTable = TABLE,
    kept: Mapping[int, Sequence[Kept]] | None = None, links: Links = Links(1e9),  # noqa: B008
    pace: Pace = Pace(1.0, 0.1, 0.2), stays: Stays = Stays(_fits),  # noqa: B008
    routes: Sequence[Route] = (), committed: int = 2,
) -> Handover:  # fmt: skip
    known = Known(STEP, committed, kept or {}, routes)
    found = handover(topology, table, going, known, stays, links, pace)
    assert found is not None
    return found


def check(
    found: Handover, topology: Topology, table: StateTable, going: Mapping[str, float],
    kept: Mapping[int, Sequence[Kept]], links: Links, pace: Pace,
) -> None:  # fmt: skip
    """What has to be true of any plan, worked out from the plan alone."""
    begin = found.stop + pace.capture
    for copy in found.copies:
        assert copy.source == topology.nodes[copy.rank]
        assert copy.source in found.goes
        assert copy.target not in going
        assert copy.begin >= begin - 1e-9
        assert copy.bytes <= links.rate(copy.source, copy.target) * (copy.done - copy.begin) + 1
        if found.sure:
            assert copy.done <= going[copy.source] * (1 - MARGIN)
    for end in ("source", "target"):
        for node in topology.nodes:
            mine = sorted((c.begin, c.done) for c in found.copies if getattr(c, end) == node)
            for (_, one), (two, _) in pairwise(mine):
                assert one <= two + 1e-9, "a link carries one part at a time"
    for rank, node in found.left_to.items():
        assert node not in going
        assert any(c.node == node and (c.mirror or c.step == found.step) for c in kept[rank])
    assert found.let_go <= found.done
    assert found.stop <= found.done
    stay = [r for r, node in enumerate(topology.nodes) if node not in found.goes]
    if table is TABLE:  # of which a mask is small
        assert (found.at_risk == 0) == _hold_all(topology, table, stay)
    if found.way is Way.CARRIED:
        left = {c.rank for c in found.copies} | found.left_to.keys()
        assert not {c.rank for c in found.copies} & found.left_to.keys()
        held = {r: owned_boxes(topology, table, r) for r in {*stay, *left}}
        for spec in table:
            boxes = [b for own in held.values() for b in own if b.name == spec.name]
            assert coverage(spec.shape, boxes) is None, "the step is whole on the nodes that stay"


def _hold_all(topology: Topology, table: StateTable, ranks: Sequence[int]) -> bool:
    """Whether every element of the state lies on one of these ranks."""
    held = {spec.name: np.zeros(spec.shape, bool) for spec in table}
    for rank in ranks:
        for box in local_boxes(topology, table, rank):
            if box.size:
                spans = zip(box.offsets, box.stops, strict=True)
                held[box.name][tuple(slice(a, b) for a, b in spans)] = True
    return all(bool(there.all()) for there in held.values())


# --- inside 20 s ----------------------------------------------------------------------------------
GIGABIT = 125e6
BILLION: StateTable = tuple(
    TensorSpec(f"{kind}.{block}", "F32", (2048, 2**14), 0)
    for kind in ("model", "exp_avg", "exp_avg_sq") for block in range(32)
)  # fmt: skip
"""1.07 G parameters, with both moments: 12.9 GB."""


@pytest.mark.parametrize(
    ("layout", "nodes", "links", "way", "travels"),
    [
        (Layout(dp_replicate=4), "abcd", Links(10 * GIGABIT), Way.LIVE, 0),
        (Layout(dp_replicate=2, dp_shard=2), "abcd", Links(GIGABIT), Way.LIVE, 0),
        (Layout(dp_shard=4), "abcd", Links(10 * GIGABIT), Way.CARRIED, 3.2e9),
        (Layout(dp_shard=8), "aabbccdd", Links(10 * GIGABIT), Way.CARRIED, 3.2e9),
    ],
)
def test_a_notice_of_30_seconds_is_a_move_inside_20(
    layout: Layout, nodes: str, links: Links, way: Way, travels: float
) -> None:
    topology, going = place(layout, 1, tuple(nodes)), {"d": 30.0}
    pace = Pace(2.0, 0.5, 0.5)
    found = plan(topology, going, table=BILLION, links=links, pace=pace)
    check(found, topology, BILLION, going, {}, links, pace)
    assert (found.way, found.sure, found.again, found.goes) == (way, True, 0, ("d",))
    assert found.let_go <= found.done <= 20.0
    assert sum(copy.bytes for copy in found.copies) == pytest.approx(travels, rel=0.02)
    assert (found.step, found.after_step, found.stop) == (STEP, True, 2.0)


def test_two_of_eight_go_and_their_parts_spread_over_the_others() -> None:
    topology = place(Layout(dp_shard=8), 1, tuple("abcdefgh"))
    going = {"a": 30.0, "b": 40.0}
    found = plan(topology, going, table=BILLION, links=Links(10 * GIGABIT))
    assert found.sure
    assert len({copy.target for copy in found.copies}) == 2, "side by side"
    assert found.done <= 5.0


# --- what need not travel -------------------------------------------------------------------------
SHARDED = place(Layout(dp_shard=2, dp_replicate=1), 1, ("a", "b"))
SLOW = Links(STATE / 2 / 4.0)  # a part in 4 s


def test_what_memory_elsewhere_has_already_does_not_travel() -> None:
    links = Links(1.0)
    for kept, way in (
        ({1: [Kept("a", STEP, mirror=True)]}, Way.CARRIED),
        ({1: [Kept("a", STEP - 3, mirror=True)]}, Way.CARRIED),
        ({1: [Kept("a", STEP)]}, Way.CARRIED),
        ({1: [Kept("b", STEP)]}, Way.BACK),  # goes with the node
        ({1: [Kept("a", STEP - 2)]}, Way.BACK),
    ):
        found = plan(SHARDED, {"b": 30.0}, kept=kept, links=links)
        check(found, SHARDED, TABLE, {"b": 30.0}, kept, links, Pace(1.0, 0.1, 0.2))
        assert found.way is way
        if way is Way.CARRIED:
            assert (found.copies, found.left_to) == ((), {1: "a"})
            assert found.reason == "b will be gone in 30 s: 1 of 1 parts lie on a"
            assert found.again == 0


def test_a_copy_of_an_older_step_has_room_for_this_one() -> None:
    stays = Stays(_fits, free={"a": 0.0})
    homeless = plan(SHARDED, {"b": 30.0}, stays=stays)
    assert (homeless.way, homeless.sure, homeless.copies) == (Way.BACK, False, ())
    assert "nobody who stays has room for the part of rank 1" in homeless.reason
    found = plan(SHARDED, {"b": 30.0}, stays=stays, kept={1: [Kept("a", STEP - 1)]})
    assert (found.way, [copy.target for copy in found.copies]) == (Way.CARRIED, ["a"])
    assert found.or_again == 1


def test_a_spare_takes_a_part() -> None:
    stays = Stays(_fits, idle=frozenset({"spare"}), free={"a": 0.0})
    found = plan(SHARDED, {"b": 30.0}, stays=stays)
    assert [(copy.rank, copy.target) for copy in found.copies] == [(1, "spare")]
    gone = plan(SHARDED, {"spare": 30.0}, stays=stays)
    assert (gone.way, gone.pause, gone.let_go, gone.copies) == (Way.LIVE, 0.0, 0.0, ())


# --- what there is no time for --------------------------------------------------------------------
def test_a_step_that_is_too_long_is_broken_off() -> None:
    pace = Pace(60.0, 0.1, 0.2)
    found = plan(SHARDED, {"b": 30.0}, pace=pace, links=SLOW)
    assert (found.way, found.sure, found.after_step, found.stop) == (Way.CARRIED, True, False, 0.0)
    assert (found.step, found.again) == (STEP - 1, 1)
    assert found.done == pytest.approx(4.3, rel=0.05)
    replicas = plan(place(Layout(dp_replicate=2), 1, ("a", "b")), {"b": 30.0}, pace=pace)
    assert (replicas.way, replicas.after_step, replicas.stop) == (Way.LIVE, False, 0.0)


def test_where_memory_is_too_slow_the_disk_has_it_else_it_is_tried_all_the_same() -> None:
    links, disk = Links(STATE / 2 / 60.0), Route(2, STATE / 5.0, 1.0)
    saved = plan(SHARDED, {"b": 30.0}, links=links, routes=[disk])
    assert (saved.way, saved.sure, saved.again, saved.let_go) == (Way.SAVED, True, 0, 6.0)
    assert saved.saves is not None
    assert saved.saves.tiers == (2,)
    tried = plan(SHARDED, {"b": 30.0}, links=links, kept={1: [Kept("a", 4), Kept("a", 5)]})
    assert (tried.way, tried.sure, len(tried.copies)) == (Way.BACK, False, 1)
    assert tried.or_again == 2
    assert tried.reason.endswith("24 s are planned with; if it fails, the run goes on from step 5")
    without = plan(SHARDED, {"b": 30.0}, links=links)
    assert without.or_again == 5, "the checkpoint of step 2"


def test_the_newest_step_elsewhere_is_one_that_all_parts_are_of() -> None:
    topology = place(Layout(dp_shard=4), 1, ("a", "b", "c", "d"))
    kept = {2: [Kept("a", 4), Kept("a", 5)], 3: [Kept("b", 4), Kept("c", 6)]}
    found = plan(topology, {"c": 30.0, "d": 30.0}, kept=kept, links=Links(1.0))
    assert STEP - found.or_again == 4, "step 6 lies on a node that goes, step 5 of one rank only"


def test_what_is_left_cannot_run_the_model() -> None:
    disk = Route(2, STATE / 5.0, 1.0)
    for going, stays in (
        ({"a": 30.0, "b": 25.0}, Stays(_fits)), ({"b": 25.0}, Stays(lambda nodes: None)),
    ):  # fmt: skip
        found = plan(SHARDED, going, stays=stays, routes=[disk])
        assert (found.way, found.sure, found.done) == (Way.LEAVE, True, 6.0)
        assert "so the run leaves: " in found.reason
    hopeless = plan(SHARDED, {"b": 5.0}, stays=Stays(lambda nodes: None), routes=[disk])
    assert (hopeless.way, hopeless.sure, hopeless.or_again) == (Way.LEAVE, False, 5)


def test_who_has_long_yet_stays_at_work_and_takes_nothing() -> None:
    topology = place(Layout(dp_shard=3), 1, ("a", "b", "c"))
    found = plan(topology, {"a": 30.0, "b": 900.0})
    assert (found.goes, found.later) == (("a",), {"b": 900.0 - SOON})
    assert {copy.target for copy in found.copies} == {"c"}
    assert handover(topology, TABLE, {"b": 900.0}, Known(STEP), Stays(_fits), SLOW, Pace(1.0)) is (
        None
    )
    with pytest.raises(ValueError, match="no rank is on node x"):
        plan(topology, {"x": 30.0})


def test_what_travels_for_the_new_layout_is_counted() -> None:
    topology = place(Layout(dp_replicate=2), 1, ("a", "b"))
    stays = Stays(lambda nodes: 3 * 10**9)
    found = plan(topology, {"b": 30.0}, stays=stays, links=Links(1e9, into={"a": 5e8}))
    assert found.pause == pytest.approx(6.2)


# --- any cluster ----------------------------------------------------------------------------------
SPEED = st.floats(STATE / 100, STATE * 10)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Topology, dict[str, float], dict[int, list[Kept]], Links]:
    degrees = [draw(st.sampled_from((1, 2))) for _ in range(3)]
    layout = Layout(
        dp_replicate=degrees[0], pp=degrees[1], dp_shard=degrees[2],
        tp=draw(st.sampled_from((1, 2))), stages=(1, 1) if degrees[1] == 2 else (),
    )  # fmt: skip
    names = "abcdefgh"[: draw(st.integers(1, 8))]
    nodes = [draw(st.sampled_from(names)) for _ in range(layout.world_size)]
    there = sorted(set(nodes))
    going = {
        node: draw(st.floats(1, 400))
        for node in draw(st.lists(st.sampled_from(there), min_size=1, unique=True))
    }
    copy = st.builds(Kept, st.sampled_from(there), st.integers(3, STEP), st.booleans())
    kept = {rank: draw(st.lists(copy, max_size=3)) for rank in range(layout.world_size)}
    speeds = st.dictionaries(st.sampled_from(there), SPEED)
    links = Links(draw(SPEED), draw(speeds), draw(speeds))
    return place(layout, 1, tuple(nodes)), going, kept, links


@settings(max_examples=60)
@given(clusters(), st.floats(0, 40), st.floats(0, 2))
def test_whatever_is_planned_is_in_time_and_whole(
    cluster: tuple[Topology, dict[str, float], dict[int, list[Kept]], Links],
    step: float, capture: float,
) -> None:  # fmt: skip
    topology, going, kept, links = cluster
    pace = Pace(step, capture, 0.5)
    found = handover(topology, TABLE, going, Known(STEP, 2, kept), Stays(_fits), links, pace)
    if found is None:
        assert min(going.values()) > SOON
        return
    check(found, topology, TABLE, going, kept, links, pace)
    assert found.sure == (found.way in (Way.LIVE, Way.CARRIED, Way.SAVED))
    if found.way is Way.CARRIED:
        assert found.at_risk > 0
        assert found.stop + capture <= min(going[node] for node in found.goes)
    again = handover(topology, TABLE, going, Known(STEP, 2, kept), Stays(_fits), links, pace)
    assert again == found, "the same on every machine that works it out"


def test_a_stage_that_goes_is_carried_whole() -> None:
    topology, going = place(Layout(pp=2, stages=(1, 1)), 1, ("a", "b")), {"a": 30.0}
    found = plan(topology, going)
    check(found, topology, TABLE, going, {}, Links(1e9), Pace(1.0, 0.1, 0.2))
    assert found.at_risk == sum(copy.bytes for copy in found.copies) > 0

"""A loss at every point of a step: the survivors go on, and the curve is as if nothing had been.

Real processes, really killed (`tests/support/step_recovery.py`). Whoever is left applies the same
steps once each, with the same bits where replicas are alike, and reports them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.core.sharding.reduction_tree import deal
from tests.support.layouts import case
from tests.support.marks import in_campaign
from tests.support.ranks import RankContext, rank_values, run_ranks
from tests.support.step_recovery import (
    DIES,
    LAST,
    Deadly,
    Survivor,
    assert_undisturbed,
    topology_for,
    undisturbed,
)

POINTS = ("forward", "told 1", "backward", "whole", "voted", "applied")


def _survive(
    rank: RankContext,
    name: str,
    victim: int,
    when: str,
    after: str,
    came_from: list[int | None],
    microbatches: int = 6,
) -> dict[str, Any]:
    """`came_from` may name newcomers: ranks beyond the layout's."""
    made = Survivor(rank, name, microbatches)
    before, topology = topology_for(name, 1), topology_for(after, 2)
    if rank.rank >= before.world_size:
        rank.wait_mark("lost", next(r for r in came_from if r is not None))
        recovered = made.join(topology, before, came_from, came_from.index(None))
    else:
        made.begin(before)
        Deadly(made, victim, DIES, when)
        made.lose(LAST)
        if rank.rank not in came_from:  # of no use without the one that was lost
            return {}
        rank.mark("lost")
        recovered = made.recover(topology, came_from)
    made.train(LAST)
    return {**made.result(), "kept": recovered.kept_replica, "stayed": recovered.computed_leaves}


def survivors(
    name: str,
    victim: int,
    when: str,
    after: str,
    came_from: Sequence[int | None],
    microbatches: int = 6,
) -> list[dict[str, Any]]:
    """What the ranks of the new generation have in the end, in no order."""
    arguments = {
        "name": name,
        "victim": victim,
        "when": when,
        "after": after,
        "came_from": list(came_from),
        "microbatches": microbatches,
    }
    size = case(name).world_size + sum(was is None for was in came_from)
    results = run_ranks(_survive, size, arguments, dies={victim: "SIGKILL"})
    for result in results:
        assert result.rank == victim or result.exit == 0, result.log
    return [result.value for result in results if result.value]


def check_reports(found: Sequence[dict[str, Any]], curve: dict[str, Any], when: str) -> None:
    """Whatever is told of a step is told by one, with the undisturbed numbers."""
    events = [event for value in found for event in value["events"]]
    told = [event for event in events if event[0] == "done"]
    for _, step, numbers in told:
        assert numbers == curve[str(step)]
    steps = [step for _, step, _ in told]
    assert len(steps) == len(set(steps))


CASES_OF_THREE = [
    (when, victim) if place % 2 else in_campaign(when, victim)
    for place, (when, victim) in enumerate(zip(POINTS, (0, 2) * 3, strict=True))
]


@pytest.mark.parametrize(("when", "victim"), CASES_OF_THREE)
def test_one_of_three_replicas_is_lost(when: str, victim: int) -> None:
    left = [rank for rank in range(3) if rank != victim]
    found = survivors("dp3", victim, when, "dp2", left)
    assert_undisturbed(found)
    assert all(value["kept"] for value in found)
    (alone,) = undisturbed("one")
    check_reports(found, alone["curve"], when)


def _whole_replicas(found: Sequence[dict[str, Any]], replica: str, when: str) -> None:
    """Every replica is as the only one of an undisturbed run, bit by bit."""
    places = undisturbed(replica)
    for value in found:
        assert LAST in map(int, value["curve"])
        assert value["curve"] == {step: places[0]["curve"][step] for step in value["curve"]}
        assert value["digest"] == places[value["place"]]["digest"]
    check_reports(found, places[0]["curve"], when)


@pytest.mark.parametrize(
    ("name", "replica", "when"),
    [
        ("dp2-shard2", "shard2", "backward"),
        in_campaign("dp2-shard2", "shard2", "told 1"),
        in_campaign("dp2-tp2", "tp2", "told 2"),
        in_campaign("pp2-dp2", "pp2", "told 1"),
        ("pp2-dp2", "pp2", "backward"),
    ],
)
def test_a_replica_of_several_ranks_goes_on_as_it_is(name: str, replica: str, when: str) -> None:
    """Its ranks come to the same end, though one may have heard every vote and the other not."""
    found = survivors(name, 3, when, replica, [0, 1])
    assert len(found) == 2
    assert all(value["kept"] for value in found)
    _whole_replicas(found, replica, when)


@pytest.mark.parametrize("name", [in_campaign("dp2-shard2"), "pp2-dp2", in_campaign("zero1.2-dp2")])
def test_a_newcomer_fills_the_gap_in_a_replica(name: str) -> None:
    """It is sent its part by the other replica, which keeps all that lies inside it."""
    replica = {"dp2-shard2": "shard2", "pp2-dp2": "pp2", "zero1.2-dp2": "zero1.2"}[name]
    found = survivors(name, 3, "told 1", name, [0, 1, 2, None])
    assert sorted(value["kept"] for value in found) == [False, False, True, True]
    _whole_replicas(found, replica, "told 1")


@pytest.mark.slow
@pytest.mark.parametrize("when", ["told 1", "backward"])
@pytest.mark.parametrize("name", ["zero2.2", "once.zero2.2"])
def test_a_replica_is_lost_while_the_other_has_gathered_its_parameters(
    name: str, when: str
) -> None:
    """Between two microbatches, or inside one. What was gathered is not used in a later step."""
    found = survivors(f"{name}-dp2", 3, when, name, [0, 1])
    assert all(value["kept"] for value in found)
    _whole_replicas(found, name, when)


@pytest.mark.parametrize("when", ["backward", in_campaign("told 1")])
def test_what_is_left_of_a_replica_becomes_one_of_another_shape(when: str) -> None:
    found = survivors("dp2-tp2", 0, when, "tp2+one", [2, 3, 1])
    (alone,) = undisturbed("one")
    assert sorted(value["kept"] for value in found) == [False, True, True]
    for value in found:
        for step, numbers in value["curve"].items():
            assert numbers == pytest.approx(alone["curve"][step], rel=1e-10)


def test_unlike_replicas() -> None:
    found = survivors("pp2+tp2+one", 4, "whole", "pp2+tp2", [0, 1, 2, 3])
    (alone,) = undisturbed("one")
    for value in found:
        assert value["kept"]
        for step, numbers in value["curve"].items():
            assert numbers == pytest.approx(alone["curve"][step], rel=1e-10)


# --- what was computed stays ------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [5, in_campaign(8), in_campaign(12)])
@pytest.mark.parametrize("victim", [1, in_campaign(3)])
def test_only_the_lost_ones_microbatches_are_computed_again(victim: int, microbatches: int) -> None:
    """All others had computed theirs, which lie in every kind of partial sums."""
    left = [rank for rank in range(4) if rank != victim]
    share = len(deal(microbatches, 4)[victim])
    found = survivors("dp4", victim, "late", "dp3", left, microbatches)
    assert_undisturbed(found, "one", microbatches)
    for value in found:
        assert value["stayed"] == microbatches - share
    assert sum(value["computed"][str(DIES)] for value in found) == microbatches


@pytest.mark.parametrize(
    ("name", "replica", "after"),
    [
        in_campaign("dp3-shard2", "shard2", "dp2-shard2"),
        in_campaign("pp2-dp3", "pp2", "pp2-dp2"),
        ("dp2-tp2", "tp2", "tp2"),
        ("zero1.2-dp2", "zero1.2", "zero1.2"),
        in_campaign("zero2.2-dp2", "zero2.2", "zero2.2"),
        in_campaign("once.zero2.2-dp2", "once.zero2.2", "once.zero2.2"),
    ],
)
def test_what_replicas_of_several_ranks_have_computed_stays(
    name: str, replica: str, after: str
) -> None:
    """The last replica is lost, by its last rank; the other ranks of it have to leave."""
    size, left = case(name).world_size, list(range(case(after).world_size))
    found = survivors(name, size - 1, "late", after, left)
    for value in found:
        assert value["kept"]
        assert value["stayed"] == 6 - 6 // len(case(name).replicas)
    _whole_replicas(found, replica, "late")


def test_a_newcomer_computes_what_the_lost_one_was_to() -> None:
    found = survivors("dp3", 1, "late", "dp3", [0, None, 2])
    for value in found:
        assert value["stayed"] == 4
        assert value["computed"][str(DIES)] == 2
    _whole_replicas(found, "one", "late")


def _between_two_microbatches(rank: RankContext, stop: int) -> list[Any]:
    """Rank 0 is interrupted after its microbatch `stop` of 6, and goes on, alone."""
    made = Survivor(rank, "dp2", 12)
    made.begin(topology_for("dp2", 1))
    made.train(2)
    rank.barrier("trained")
    if rank.rank == 1:
        rank.wait_mark("interrupted", 0)
        return []
    made.stop(3, stop)
    rank.mark("interrupted")
    stayed = made.recover(topology_for("one", 2), [0]).computed_leaves
    made.train(LAST)
    return [stayed, made.result()]


@pytest.mark.parametrize(
    "stop", [in_campaign(1), in_campaign(2), 3, in_campaign(4), in_campaign(5)]
)
def test_who_computes_alone_stops_between_two_microbatches(stop: int) -> None:
    """The first of two siblings lies outside of every buffer meanwhile."""
    stayed, value = rank_values(_between_two_microbatches, 2, {"stop": stop})[0]
    assert stayed == stop
    assert_undisturbed([value], "one", 12)


# --- more than one fault --------------------------------------------------------------------


def _grown(rank: RankContext, name: str, after: str, came_from: list[int | None]) -> dict[str, Any]:
    """Between two steps, with nobody lost."""
    made = Survivor(rank, name)
    before, topology = topology_for(name, 1), topology_for(after, 2)
    if rank.rank < before.world_size:
        made.begin(before)
        made.train(2)
    rank.barrier("paused")
    if rank.rank < before.world_size:
        made.recover(topology, came_from)
    else:
        made.join(topology, before, came_from, rank.rank)
    made.train(LAST)
    return made.result()


@pytest.mark.parametrize(
    ("name", "after", "came_from"),
    [in_campaign("dp2", "dp3", [0, 1, None]), ("shard2", "dp2-shard2", [1, 0, None, None])],
)
def test_replicas_join_between_two_steps(
    name: str, after: str, came_from: list[int | None]
) -> None:
    arguments = {"name": name, "after": after, "came_from": came_from}
    found = rank_values(_grown, len(came_from), arguments)
    places = undisturbed("one" if name == "dp2" else name)
    for value in found:
        steps = {step: places[0]["curve"][step] for step in value["curve"]}
        assert value["curve"] == steps
        assert value["digest"] == places[value["place"]]["digest"]


def _halted(rank: RankContext, name: str, after: str, left: list[int]) -> dict[str, Any]:
    """The last rank is stopped, not dead: nobody is told by a socket. A thread of each of the
    others interrupts it, as orders from outside do."""
    made = Survivor(rank, name)
    made.begin(topology_for(name, 1))
    made.train(2)
    last = rank.world_size - 1
    if rank.rank == last:
        rank.mark("stops")
        rank.kill(last, "SIGSTOP")
    rank.wait_mark("stops", last)
    thread = threading.Timer(0.05 * (rank.rank % 2), made.engine.interrupt, [False])
    thread.start()
    made.lose(LAST)
    thread.join()
    if rank.rank not in left:
        made.engine.interrupt(True)
        return {}
    kept = made.recover(topology_for(after, 2), left).kept_replica
    made.train(LAST)
    rank.mark("done")
    if rank.rank == left[0]:
        for other in left:
            rank.wait_mark("done", other)
        rank.kill(last)
    return {**made.result(), "kept": kept}


@pytest.mark.parametrize(
    ("name", "after", "left"), [in_campaign("dp3", "dp2", [0, 1]), ("dp2-shard2", "shard2", [0, 1])]
)
def test_orders_wake_who_waits_for_a_rank_that_hangs(
    name: str, after: str, left: list[int]
) -> None:
    size = case(name).world_size
    arguments = {"name": name, "after": after, "left": left}
    results = run_ranks(_halted, size, arguments, dies={size - 1: "SIGKILL"})
    found = []
    for result in results[:-1]:
        assert result.exit == 0, result.log
        found += [result.value] if result.value else []
    assert all(value["kept"] for value in found)
    _whole_replicas(found, "one" if after == "dp2" else after, "")


def _before_any_step(rank: RankContext) -> dict[str, Any]:
    """Rank 2 leaves before the first step; the others enter two generations before they train."""
    made = Survivor(rank, "dp3")
    made.begin(topology_for("dp3", 1))
    rank.barrier("begun")  # whoever is still connecting needs rank 2
    if rank.rank == 2:
        return {}
    for generation, came_from in ((2, [0, 1]), (3, [1, 0])):
        made.recover(topology_for("dp2", generation), came_from)
    made.train(LAST)
    return made.result()


def test_a_generation_may_end_before_its_first_step() -> None:
    """Nobody has fed anything in it, so nobody's ledger is missing."""
    *found, _ = rank_values(_before_any_step, 3)
    assert_undisturbed(found)
    for value in found:
        assert value["events"] == []

"""A loss at every point of a step: the survivors go on, and the curve is as if nothing had been.

Real processes, really killed (`recovering.py`). Whoever is left applies the same steps once each,
with the same bits where replicas are alike, and reports them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from holdfast.errors import NonFiniteError, PeerLostError
from holdfast.policy.commit import Stage
from holdfast.spec.tree import deal
from holdfast.train import recover as recover_module
from tests.ranks import RankContext, rank_values, run_ranks
from tests.train.layouts import case
from tests.train.recovering import Deadly, Survivor, topology_for
from tests.train.spoiling import spoil_once

DIES, LAST = 3, 5
POINTS = ("forward", "told 1", "backward", "whole", "voted", "applied")


def _undisturbed(rank: RankContext, name: str, microbatches: int) -> dict[str, Any]:
    made = Survivor(rank, name, microbatches)
    made.begin(topology_for(name, 1))
    made.train(LAST)
    return made.result()


@cache
def undisturbed(name: str, microbatches: int = 6) -> list[dict[str, Any]]:
    """What each rank of one replica has, when nobody is lost."""
    arguments = {"name": name, "microbatches": microbatches}
    return list(rank_values(_undisturbed, case(name).world_size, arguments))


def _survive(
    rank: RankContext, name: str, victim: int, when: str, after: str, came_from: list[int | None],
    microbatches: int = 6,
) -> dict[str, Any]:  # fmt: skip
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
    return {**made.result(), "kept": recovered.kept_inside, "stayed": recovered.computed}


def survivors(
    name: str, victim: int, when: str, after: str, came_from: Sequence[int | None],
    microbatches: int = 6,
) -> list[dict[str, Any]]:  # fmt: skip
    """What the ranks of the new generation have in the end, in no order."""
    arguments = {
        "name": name, "victim": victim, "when": when, "after": after,
        "came_from": list(came_from), "microbatches": microbatches,
    }  # fmt: skip
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


@pytest.mark.parametrize(("when", "victim"), list(zip(POINTS, (0, 2) * 3, strict=True)))
def test_one_of_three_replicas_is_lost(when: str, victim: int) -> None:
    left = [rank for rank in range(3) if rank != victim]
    found = survivors("dp3", victim, when, "dp2", left)
    (alone,) = undisturbed("one")
    for value in found:
        assert value["curve"] == alone["curve"]  # bit by bit
        assert value["digest"] == alone["digest"]
        assert value["kept"]
    check_reports(found, alone["curve"], when)


@pytest.mark.parametrize("microbatches", [5, 8, 12])
def test_any_number_of_microbatches(microbatches: int) -> None:
    """And the fourth of four replicas, so that the others' numbers stay."""
    found = survivors("dp4", 3, "backward", "dp3", [0, 1, 2], microbatches)
    (alone,) = undisturbed("one", microbatches)
    for value in found:
        assert value["curve"] == alone["curve"]
        assert value["digest"] == alone["digest"]
        assert value["kept"]


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
        ("dp2-shard2", "shard2", "backward"), ("dp2-shard2", "shard2", "told 1"),
        ("dp2-tp2", "tp2", "told 2"), ("pp2-dp2", "pp2", "told 1"), ("pp2-dp2", "pp2", "backward"),
    ],
)  # fmt: skip
def test_a_replica_of_several_ranks_goes_on_as_it_is(name: str, replica: str, when: str) -> None:
    """Its ranks come to the same end, though one may have heard every vote and the other not."""
    found = survivors(name, 3, when, replica, [0, 1])
    assert len(found) == 2
    assert all(value["kept"] for value in found)
    _whole_replicas(found, replica, when)


@pytest.mark.parametrize("name", ["dp2-shard2", "pp2-dp2", "zero1.2-dp2"])
def test_a_newcomer_fills_the_gap_in_a_replica(name: str) -> None:
    """It is sent its part by the other replica, which keeps all that lies inside it."""
    replica = {"dp2-shard2": "shard2", "pp2-dp2": "pp2", "zero1.2-dp2": "zero1.2"}[name]
    found = survivors(name, 3, "told 1", name, [0, 1, 2, None])
    assert sorted(value["kept"] for value in found) == [False, False, True, True]
    _whole_replicas(found, replica, "told 1")


@pytest.mark.parametrize("when", ["backward", "told 1"])
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


@pytest.mark.parametrize("microbatches", [5, 8, 12])
@pytest.mark.parametrize("victim", [1, 3])
def test_only_the_lost_ones_microbatches_are_computed_again(victim: int, microbatches: int) -> None:
    """All others had computed theirs, which lie in every kind of partial sums."""
    left = [rank for rank in range(4) if rank != victim]
    share = len(deal(microbatches, 4)[victim])
    found = survivors("dp4", victim, "late", "dp3", left, microbatches)
    (alone,) = undisturbed("one", microbatches)
    for value in found:
        assert value["stayed"] == microbatches - share
        assert value["curve"] == alone["curve"]
        assert value["digest"] == alone["digest"]
    assert sum(value["computed"][str(DIES)] for value in found) == microbatches


@pytest.mark.parametrize(
    ("name", "replica", "after"),
    [
        ("dp3-shard2", "shard2", "dp2-shard2"), ("pp2-dp3", "pp2", "pp2-dp2"),
        ("dp2-tp2", "tp2", "tp2"), ("zero1.2-dp2", "zero1.2", "zero1.2"),
    ],
)  # fmt: skip
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
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1
        if passes == stop:
            made.engine.interrupt(False)

    hook = made.engine.objective.register_forward_pre_hook(count)
    made.lose(3)
    rank.mark("interrupted")
    hook.remove()
    stayed = made.recover(topology_for("one", 2), [0]).computed
    made.train(LAST)
    return [stayed, made.result()]


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
def test_who_computes_alone_stops_between_two_microbatches(stop: int) -> None:
    """The first of two siblings lies outside of every buffer meanwhile."""
    stayed, value = rank_values(_between_two_microbatches, 2, {"stop": stop})[0]
    (alone,) = undisturbed("one", 12)
    assert stayed == stop
    assert value["curve"] == alone["curve"]
    assert value["digest"] == alone["digest"]


# --- more than one fault --------------------------------------------------------------------


def _lost_twice(rank: RankContext) -> dict[str, Any]:
    """Rank 1 dies in step 3, and rank 2 in the recovery from it."""
    made = Survivor(rank, "dp4")
    made.begin(topology_for("dp4", 1))
    Deadly(made, 1, DIES, "told 1")
    made.lose(LAST)
    if rank.rank == 2:
        module: Any = recover_module
        module.agree = lambda *_: rank.kill(2)
    with pytest.raises(PeerLostError):
        made.recover(topology_for("dp3", 2), [0, 2, 3])
    made.recover(topology_for("dp2", 3), [3, 0])
    made.train(LAST)
    return made.result()


def test_a_second_one_is_lost_in_the_recovery() -> None:
    results = run_ranks(_lost_twice, 4, dies={1: "SIGKILL", 2: "SIGKILL"})
    (alone,) = undisturbed("one")
    for result in results:
        if result.rank in (0, 3):
            assert result.exit == 0, result.log
            assert result.value["curve"] == alone["curve"]
            assert result.value["digest"] == alone["digest"]


def _stopped(made: Survivor, after: int) -> None:
    """This rank ends step 3 after so many of its microbatches; with 0 once somebody has."""
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1
        if passes == after:
            made.engine.interrupt(False)

    if after == 0:
        made.engine.interrupt(False)
    hook = made.engine.objective.register_forward_pre_hook(count)
    made.lose(DIES)
    hook.remove()


def _interrupted_twice(rank: RankContext) -> list[Any]:
    """Of step 3 rank 2 computes the first part, and after an interruption rank 3 another one."""
    made, stayed = Survivor(rank, "dp4", 12), list[int]()
    made.begin(topology_for("dp4", 1))
    made.train(DIES - 1)
    for computes, after, came_from in ((2, "dp3", [0, 2, 3]), (3, "dp2", [1, 2])):
        generation = made.engine.groups.topology.generation
        rank.barrier(f"at {generation}")
        if rank.rank != computes:
            rank.wait_mark(f"stopped {generation}", computes)
        if made.me in came_from:
            _stopped(made, int(rank.rank == computes))
        rank.mark(f"stopped {generation}")
        if made.me not in came_from:
            made.engine.interrupt(True)
            rank.barrier("at 2")
            return []
        stayed.append(made.recover(topology_for(after, generation + 1), came_from).computed)
    made.train(LAST)
    return [stayed, made.result()]


def test_what_was_kept_counts_for_one_attempt_only() -> None:
    """Who has kept something, and is interrupted again, begins anew: though others go on."""
    (alone,) = undisturbed("one", 12)
    for stayed, value in filter(None, rank_values(_interrupted_twice, 4)):
        assert stayed == [1, 1]
        assert value["curve"] == alone["curve"]
        assert value["digest"] == alone["digest"]


class Breaks(Deadly):
    """It is stopped by an error, and lives."""

    def _whole(self) -> None:
        self._replace("vote", self._broken)

    def _broken(self, vote: Any) -> Any:
        def instead(*arguments: Any) -> Any:
            if self.survivor.engine.step == self.step:
                self.survivor.engine.interrupt(True)
                raise PeerLostError("broken")
            return vote(*arguments)

        return instead


def _interrupted(rank: RankContext) -> dict[str, Any]:
    """Rank 1 is stopped in step 3 when all hold the whole gradient; the recovery in which they
    apply it does not come to its end."""
    made, everybody = Survivor(rank, "dp3"), [0, 1, 2]
    made.begin(topology_for("dp3", 1))
    Breaks(made, 1, DIES, "whole")
    made.lose(LAST)
    module: Any = recover_module
    plain = module.complete

    def interrupted(*_: Any) -> None:
        raise PeerLostError("told to halt")

    module.complete = interrupted
    with pytest.raises(PeerLostError, match="told to halt"):
        made.recover(topology_for("dp3", 2), everybody)
    module.complete = plain
    assert made.engine.applied == DIES
    made.engine.interrupt(True)
    made.recover(topology_for("dp3", 3), everybody)
    made.train(LAST)
    return made.result()


def test_a_step_that_was_applied_in_a_recovery_that_failed_is_told_of() -> None:
    found = rank_values(_interrupted, 3)
    (alone,) = undisturbed("one")
    told = [event for value in found for event in value["events"] if event[0] == "done"]
    assert told == [["done", DIES, alone["curve"][str(DIES)]]]


TOUCHED = "fill", "begun"  # where a recovery breaks off when the groups are new


def _turned(made: Survivor, fails: str, generation: int) -> None:
    """Three replicas enter a generation in which the first and the last have changed places. It
    fails on all of them at `fails`, or for "begun" is over before anybody has begun its step."""
    module: Any = recover_module
    where, name = (module._Entry, "fill") if fails == "fill" else (module, fails)
    plain = getattr(where, name, None)

    def broken(*_: Any) -> None:
        raise PeerLostError("a newcomer is lost")

    if plain is None:
        made.recover(topology_for("dp3", generation), [2, 1, 0])
    else:
        setattr(where, name, broken)
        with pytest.raises(PeerLostError, match="a newcomer is lost"):
            made.recover(topology_for("dp3", generation), [2, 1, 0])
        setattr(where, name, plain)
    made.engine.interrupt(True)


def _broken_off(rank: RankContext, fails: list[str], summed: bool) -> list[Any]:
    """Of step 3 rank 2 computes a part; and so many recoveries are broken off. Rank 0 leaves then.
    summed: it held all pieces of some bucket, so nothing could be kept as long as it took part."""
    made = Survivor(rank, "dp3", 12)
    made.begin(topology_for("dp3", 1))
    made.train(DIES - 1)
    rank.barrier("trained")
    if rank.rank != 2:
        rank.wait_mark("stopped", 2)
    _stopped(made, int(rank.rank == 2))
    rank.mark("stopped")
    if rank.rank == 0 and summed:
        made.engine._gradients.reducers[0].summed = True  # type: ignore[attr-defined]
    for generation, point in enumerate(fails, 2):
        _turned(made, point, generation)
    if rank.rank == 0:
        rank.mark("left")
        return []
    rank.wait_mark("left", 0)
    left = [0, 1] if sum(point in TOUCHED for point in fails) % 2 else [1, 2]
    stayed = made.recover(topology_for("dp2", len(fails) + 2), left).computed
    made.train(LAST)
    return [stayed, made.result()]


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize(
    "fails",
    [
        ["agree"], ["complete"], ["fill"], ["begun"], ["fill", "fill"], ["complete", "fill"],
        ["fill", "complete"], ["fill", "begun"], ["begun", "fill"],
    ],
    ids="-".join,
)  # fmt: skip
def test_recoveries_that_break_off_spoil_nothing(fails: list[str], summed: bool) -> None:
    """What a replica has computed of a step is kept among those who are left, or void: it is never
    taken for what another replica was to compute, though its number may have changed meanwhile."""
    (alone,) = undisturbed("one", 12)
    tried = fails != ["agree"]  # nobody has found out then what there is
    touched = any(point in TOUCHED for point in fails)
    stays = int(not touched) if summed or not tried else 0
    arguments = {"fails": fails, "summed": summed}
    for stayed, value in filter(None, rank_values(_broken_off, 3, arguments)):
        assert stayed == stays
        assert value["curve"] == alone["curve"]
        assert value["digest"] == alone["digest"]


def _whole_among_others(rank: RankContext) -> list[Any]:
    """Rank 0 alone knows the whole gradient of step 3, and goes on among replicas of one kind,
    whose gradients lie otherwise. Whoever did not know it leaves before the state is complete."""
    made = Survivor(rank, "dp2+tp2")
    made.begin(topology_for("dp2+tp2", 1))
    Breaks(made, 1, DIES, "whole")
    made.lose(LAST)
    if rank.rank > 1:
        made.engine.interrupt(True)
        return []
    assert made.engine.held.whole == DIES
    if rank.rank == 1:
        made.engine.stage = Stage.COMPUTING  # it is interrupted a moment before
    plain = recover_module._Entry.fill
    module: Any = recover_module

    def broken(*_: Any) -> None:
        raise PeerLostError("a newcomer is lost")

    module._Entry.fill = broken
    with pytest.raises(PeerLostError, match="a newcomer is lost"):
        made.recover(topology_for("dp2", 2), [0, 1])
    module._Entry.fill = plain
    made.engine.interrupt(True)
    if rank.rank == 1:
        rank.mark("left")
        return []
    rank.wait_mark("left", 1)
    step = made.recover(topology_for("one", 3), [0]).step
    made.train(LAST)
    return [step, made.result()]


def test_a_gradient_is_whole_only_in_the_buffers_it_was_summed_in() -> None:
    (alone,) = undisturbed("one")
    ((step, value),) = filter(None, rank_values(_whole_among_others, 4))
    assert step == DIES - 1
    for number, numbers in value["curve"].items():
        assert numbers == pytest.approx(alone["curve"][number], rel=1e-10)


def _bad_and_interrupted(rank: RankContext) -> dict[str, Any]:
    """Step 3 is not finite; as it is done again rank 1 is stopped before its vote, so that its
    gradient is applied in the recovery."""
    made, everybody = Survivor(rank, "dp3"), [0, 1, 2]
    made.begin(topology_for("dp3", 1))
    made.train(DIES - 1)
    if rank.rank == 1:
        spoil_once(made.engine._gradients.reducers[0])  # type: ignore[attr-defined]
    with pytest.raises(NonFiniteError):
        made.one_step(DIES)
    made.engine.interrupt(True)
    made.recover(topology_for("dp3", 2), everybody)
    Breaks(made, 1, DIES, "whole")
    made.lose(LAST)
    made.recover(topology_for("dp3", 3), everybody)
    assert made.step == DIES
    made.train(LAST)
    return made.result()


def test_what_was_heard_of_a_bad_attempt_does_not_count_for_the_next() -> None:
    (alone,) = undisturbed("one")
    for value in rank_values(_bad_and_interrupted, 3):
        assert value["curve"] == alone["curve"]
        assert value["digest"] == alone["digest"]


def _torn(rank: RankContext) -> dict[str, Any]:
    """Rank 2 has lost its state in an update that was interrupted."""
    made = Survivor(rank, "dp3")
    made.begin(topology_for("dp3", 1))
    Deadly(made, 0, DIES, "forward")
    made.lose(LAST)
    if rank.rank == 2:
        made.engine.torn = True
        for held in made.engine.state():
            held.tensor.zero_()
    kept = made.recover(topology_for("dp2", 2), [1, 2]).kept_inside
    made.train(LAST)
    return {**made.result(), "kept": kept}


def test_who_has_lost_its_state_is_sent_it() -> None:
    results = run_ranks(_torn, 3, dies={0: "SIGKILL"})
    (alone,) = undisturbed("one")
    for result in results[1:]:
        assert result.exit == 0, result.log
        assert result.value["digest"] == alone["digest"]
        assert result.value["kept"] == (result.rank == 1)


# --- no fault -------------------------------------------------------------------------------


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
    [("dp2", "dp3", [0, 1, None]), ("shard2", "dp2-shard2", [1, 0, None, None])],
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
    kept = made.recover(topology_for(after, 2), left).kept_inside
    made.train(LAST)
    rank.mark("done")
    if rank.rank == left[0]:
        for other in left:
            rank.wait_mark("done", other)
        rank.kill(last)
    return {**made.result(), "kept": kept}


@pytest.mark.parametrize(
    ("name", "after", "left"), [("dp3", "dp2", [0, 1]), ("dp2-shard2", "shard2", [0, 1])]
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
    (alone,) = undisturbed("one")
    for value in found:
        assert value["curve"] == alone["curve"]  # bit by bit
        assert value["digest"] == alone["digest"]
        assert value["events"] == []

"""Losses and interruptions that come while a loss is being recovered from: in the same step again,
in the middle of a recovery, after its groups are new."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.errors import NonFiniteError, PeerLostError
from holdfast.layout import Topology
from holdfast.policy.recovery.step_resolution import StepStage
from holdfast.training.recover import recover as recover_module
from tests.support.marks import in_campaign
from tests.support.nan_gradient import spoil_once
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


def _lost_twice(rank: RankContext) -> dict[str, Any]:
    """Rank 1 dies in step 3, and rank 2 in the recovery from it."""
    made = Survivor(rank, "dp4")
    made.begin(topology_for("dp4", 1))
    Deadly(made, 1, DIES, "told 1")
    made.lose(LAST)
    module: Any = recover_module
    real = module.agree

    def agree(*args: Any) -> Any:
        # If it is lost while ranks still connect to it, they wait until their time limit.
        rank.mark("met")
        if rank.rank == 2:
            rank.wait_mark("met", 0)
            rank.wait_mark("met", 3)
            rank.kill(2)
        return real(*args)

    module.agree = agree
    with pytest.raises(PeerLostError):
        made.recover(topology_for("dp3", 2), [0, 2, 3])
    made.recover(topology_for("dp2", 3), [3, 0])
    made.train(LAST)
    return made.result()


def test_a_second_one_is_lost_in_the_recovery() -> None:
    results = run_ranks(_lost_twice, 4, deadline=240.0, dies={1: "SIGKILL", 2: "SIGKILL"})
    left = [results[0], results[3]]
    for result in left:
        assert result.exit == 0, result.log
    assert_undisturbed([result.value for result in left])


def _break_off(
    made: Survivor, at: str, topology: Topology, came_from: Sequence[int | None], meet: str = ""
) -> None:
    """A recovery that fails where it comes to the function `at`; all of its ranks `meet` there."""
    where: Any = recover_module.GenerationEntry if at == "fill" else recover_module
    plain = getattr(where, at)

    def broken(*_: Any) -> None:
        if meet:
            made.rank.barrier(meet)
        raise PeerLostError("a newcomer is lost")

    setattr(where, at, broken)
    with pytest.raises(PeerLostError, match="a newcomer is lost"):
        made.recover(topology, came_from)
    setattr(where, at, plain)
    made.engine.interrupt(True)


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
            made.stop(DIES, int(rank.rank == computes))
        rank.mark(f"stopped {generation}")
        if made.me not in came_from:
            made.engine.interrupt(True)
            rank.barrier("at 2")
            return []
        stayed.append(made.recover(topology_for(after, generation + 1), came_from).computed_leaves)
    made.train(LAST)
    return [stayed, made.result()]


def test_what_was_kept_counts_for_one_attempt_only() -> None:
    """Who has kept something, and is interrupted again, begins anew: though others go on."""
    for stayed, value in filter(None, rank_values(_interrupted_twice, 4)):
        assert stayed == [1, 1]
        assert_undisturbed([value], "one", 12)


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
    _break_off(made, "complete", topology_for("dp3", 2), everybody, "interrupted")
    assert made.engine.status.applied_step == DIES
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
    fails on all of them at `fails`, or for "begun" is over before any rank has begun its step.
    A rank leaves only when all ranks are there, because peers may still connect to it."""
    topology, swapped = topology_for("dp3", generation), [2, 1, 0]
    if fails != "begun":
        _break_off(made, fails, topology, swapped, f"broken {generation}")
        return
    made.recover(topology, swapped)
    made.rank.barrier(f"begun {generation}")
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
    made.stop(DIES, int(rank.rank == 2))
    rank.mark("stopped")
    if rank.rank == 0 and summed:
        made.engine._gradients.reducers[0].is_summed = True  # type: ignore[attr-defined]
    for generation, point in enumerate(fails, 2):
        _turned(made, point, generation)
    if rank.rank == 0:
        rank.mark("left")
        return []
    rank.wait_mark("left", 0)
    left = [0, 1] if sum(point in TOUCHED for point in fails) % 2 else [1, 2]
    stayed = made.recover(topology_for("dp2", len(fails) + 2), left).computed_leaves
    made.train(LAST)
    return [stayed, made.result()]


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize(
    "fails",
    [
        in_campaign(["agree"]),
        in_campaign(["complete"]),
        in_campaign(["fill"]),
        in_campaign(["begun"]),
        in_campaign(["fill", "fill"]),
        ["complete", "fill"],
        in_campaign(["fill", "complete"]),
        ["fill", "begun"],
        in_campaign(["begun", "fill"]),
    ],
    ids="-".join,
)
def test_recoveries_that_break_off_spoil_nothing(fails: list[str], summed: bool) -> None:
    """What a replica has computed of a step is kept among those who are left, or void: it is never
    taken for what another replica was to compute, though its number may have changed meanwhile."""
    tried = fails != ["agree"]  # nobody has found out then what there is
    touched = any(point in TOUCHED for point in fails)
    stays = int(not touched) if summed or not tried else 0
    arguments = {"fails": fails, "summed": summed}
    for stayed, value in filter(None, rank_values(_broken_off, 3, arguments)):
        assert stayed == stays
        assert_undisturbed([value], "one", 12)


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
    assert made.engine.status.reduced_step == DIES
    if rank.rank == 1:
        made.engine.status.stage = StepStage.COMPUTING  # it is interrupted a moment before
    _break_off(made, "fill", topology_for("dp2", 2), [0, 1])
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
    assert_undisturbed(rank_values(_bad_and_interrupted, 3))


def _torn(rank: RankContext) -> dict[str, Any]:
    """Rank 2 has lost its state in an update that was interrupted."""
    made = Survivor(rank, "dp3")
    made.begin(topology_for("dp3", 1))
    Deadly(made, 0, DIES, "forward")
    made.lose(LAST)
    if rank.rank == 2:
        made.engine.status.is_torn = True
        for held in made.engine.state():
            held.tensor.zero_()
    kept = made.recover(topology_for("dp2", 2), [1, 2]).kept_replica
    made.train(LAST)
    return {**made.result(), "kept": kept}


def test_who_has_lost_its_state_is_sent_it() -> None:
    results = run_ranks(_torn, 3, dies={0: "SIGKILL"})
    (alone,) = undisturbed("one")
    for result in results[1:]:
        assert result.exit == 0, result.log
        assert result.value["digest"] == alone["digest"]
        assert result.value["kept"] == (result.rank == 1)

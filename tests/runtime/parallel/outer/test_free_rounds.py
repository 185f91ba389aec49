"""Rounds that close without learners that are late."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from holdfast.core.data.learner_fates import (
    LearnerFate,
    LearnerProgress,
    count_fates,
    decide_fates,
    row_problems,
)
from holdfast.errors import PeerLostError
from holdfast.parallel.comm.transport import PeerGroup
from holdfast.parallel.outer.payloads import PayloadRound
from holdfast.parallel.outer.round_close import RoundClose
from tests.support.ranks import RankContext, rank_values, ranks, wait_until

EVERY, SHARES = 4, ((0,), (1,), (2, 3))
PROGRESS = [
    LearnerProgress(EVERY, 40, 0),
    LearnerProgress(EVERY, 40, 0),
    LearnerProgress(3, 30, 10),
    LearnerProgress(0, 0, 40),
]


@pytest.mark.parametrize(
    ("late", "fate", "weight"),
    [("drop", "dropped", 0), ("use", "used_late", 30), ("discount", "late", 15)],
)
def test_every_token_of_the_slices_has_one_fate(late: str, fate: str, weight: float) -> None:
    rows = decide_fates(7, EVERY, PROGRESS, late, 0.5)
    counts = count_fates(rows)
    assert (counts["used"], counts[fate], counts["not_computed"]) == (80, 30, 50)
    assert sum(counts.values()) == 160
    assert [row.weight for row in rows] == [40, 40, weight, 0]
    assert [LearnerFate.from_json(row.to_json()) for row in rows] == rows


@pytest.mark.parametrize(
    "changes", [{"steps": 2}, {"tokens": 41}, {"weight": 1.0}, {"fate": "used"}, {"base": 5}]
)
def test_an_edited_row_is_named(changes: dict[str, object]) -> None:
    rows = decide_fates(7, EVERY, PROGRESS, "drop", 0.5)
    assert not list(row_problems(rows, rows))
    edited = LearnerFate.from_json(rows[2].to_json() | changes)
    (problem,) = row_problems([*rows[:2], edited, rows[3]], rows)
    assert "learner 2" in problem
    assert next(iter(changes)) in problem


def _peers(rank: RankContext) -> PeerGroup:
    return PeerGroup(rank.store(), "rounds", rank.rank, rank.world_size, seconds=120)


def _round(
    peers: PeerGroup, before: PayloadRound | None, late: int
) -> tuple[PayloadRound, list[int], dict[int, int]]:
    """A round in which the first learner of rank `late` computes until the close. Returns the inner
    steps of all learners and the payloads of those that were done."""
    exchange = PayloadRound(peers, SHARES, 8, before)
    close = RoundClose(peers, SHARES, quorum=2, grace_s=0.0 if late >= 0 else 60.0, every=EVERY)
    for learner in SHARES[peers.rank]:
        steps = EVERY
        if late == peers.rank:
            steps = 3 if learner == SHARES[late][0] else 0
            wait_until(partial(close.stops, learner, steps), 120, "the close")
        if steps == EVERY:
            exchange.send(learner, torch.full((8,), learner, dtype=torch.uint8))
        close.report(learner, LearnerProgress(steps, 10 * steps, 0))
    steps_of_all = [progress.steps for progress in close.wait_for_all()]
    done = [learner for learner, steps in enumerate(steps_of_all) if steps == EVERY]
    payloads = exchange.wait_for_all(done)
    peers.all_reduce(torch.zeros(1)).wait()  # the vote
    return exchange, steps_of_all, {k: int(payloads[k][0]) for k in done}


def _three_rounds(rank: RankContext) -> list[object]:
    peers, found, before = _peers(rank), list[object](), None
    for late in (2, 0, -1):
        before, steps, payloads = _round(peers, before, late)
        found.append([steps, sorted(payloads.items())])
    rank.barrier("end")
    return found


def test_a_round_closes_without_a_late_rank_and_the_next_has_it() -> None:
    late, led, all_done = [4, 4, 3, 0], [3, 4, 4, 4], [4, 4, 4, 4]
    expected = [
        [steps, [[k, k] for k, n in enumerate(steps) if n == EVERY]]
        for steps in (late, led, all_done)
    ]
    assert rank_values(_three_rounds, 3, {}) == [expected] * 3


@ranks(3, dies={2: "SIGKILL"})
def test_a_lost_rank_ends_the_round_on_all_others(rank: RankContext) -> None:
    peers = _peers(rank)
    rank.barrier("joined")
    if rank.rank == 2:
        rank.kill(2)
    with pytest.raises(PeerLostError):
        _round(peers, None, -1)

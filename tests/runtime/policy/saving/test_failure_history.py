"""What a journal says about how often its run breaks."""

from __future__ import annotations

import pytest

from holdfast.events import (
    Event,
    GenerationStarted,
    Record,
    RunFinished,
    RunStopped,
    StepDone,
    WorkerHeld,
    WorkerLost,
    WorkerReady,
)
from holdfast.policy.saving.failure_classes import PRIOR_FAILURE_COUNTS, FailureHistory
from holdfast.policy.saving.failure_rate import FailureRate

DONE = StepDone(loss=1.0, tokens=1, grad_norm=1.0, learning_rate=0.1, seconds=1.0, step=1)
TWO_NODES = GenerationStarted({"nodes": ["a", "a", "b"]}, "start")


def _seen(generations: list[list[tuple[float, Event]]]) -> FailureRate:
    return _all_seen(generations).failure_rate


def _all_seen(generations: list[list[tuple[float, Event]]]) -> FailureHistory:
    """What is known when the generation after the last has begun."""
    seen = FailureHistory(FailureRate.from_prior())
    for number, found in enumerate([*generations, [(0.0, TWO_NODES)]], start=1):
        for sequence, (at, event) in enumerate(found):
            seen.observe(Record(number, "agent", sequence, 1e9 + at, event))
    return seen


def test_a_lost_worker_leaves_its_nodes_memory_and_silence_takes_it() -> None:
    begun: list[tuple[float, Event]] = [(0, TWO_NODES), (2, WorkerReady(0, 1.0)), (90, DONE)]
    lost = _all_seen([[*begun, (91, WorkerLost(1, 7, "SIGKILL", "exit"))]]).failure_classes.counts
    silent = _all_seen([begun]).failure_classes.counts
    assert lost == (PRIOR_FAILURE_COUNTS[0] + 1, *PRIOR_FAILURE_COUNTS[1:])
    assert silent == (
        PRIOR_FAILURE_COUNTS[0],
        PRIOR_FAILURE_COUNTS[1] + 1,
        *PRIOR_FAILURE_COUNTS[2:],
    )
    stopped = _all_seen([[*begun, (91, WorkerHeld(1, 3, None, "an error"))]]).failure_classes.counts
    assert stopped == lost
    assert (
        _all_seen([[*begun, (91, RunStopped("SIGTERM"))]]).failure_classes.counts
        == PRIOR_FAILURE_COUNTS
    )


def test_time_at_risk_is_from_ready_to_the_loss_on_all_nodes() -> None:
    lost = WorkerLost(1, 7, "SIGKILL", "exit")
    found = _seen(
        [
            [
                (0, TWO_NODES),
                (5, WorkerReady(0, 1.0)),
                (8, WorkerReady(1, 1.0)),
                (50, DONE),
                (108, lost),
            ],
            [(0, TWO_NODES), (10, WorkerReady(0, 1.0)), (60, DONE), (61, lost), (62, lost)],
        ]
    )
    assert (found.failures, found.seconds) == (2, pytest.approx(152))
    want = FailureRate.from_prior().with_observation(100, 2, 1).with_observation(52, 2, 1)
    assert found.failures_per_second() == pytest.approx(want.failures_per_second())


def test_leaving_is_no_failure_but_a_session_without_a_last_word_is() -> None:
    begun: list[tuple[float, Event]] = [(0, TWO_NODES), (2, WorkerReady(0, 1.0)), (90, DONE)]
    assert _seen([[*begun, (91, RunStopped("SIGTERM"))]]).failures == 0
    assert _seen([[*begun, (91, RunFinished())]]).failures == 0
    assert _seen([begun]).failures == 1


def test_a_generation_that_never_became_ready_says_nothing() -> None:
    assert (
        _seen([[(0, TWO_NODES), (9, WorkerLost(0, 1, "exit 1", "exit"))]])
        == FailureRate.from_prior()
    )

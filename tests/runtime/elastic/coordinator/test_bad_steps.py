"""What the coordinator makes of what those say who stopped for a bad step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from holdfast.elastic.coordinator.bad_steps import BadStepTracker
from holdfast.elastic.protocol.generation_record import GenerationRecord
from holdfast.elastic.run_result import RunEndedError
from holdfast.events import Blamed
from holdfast.layout import Layout, Topology, place_replicas
from holdfast.policy.recovery.survivors import HeldState, RejectedStep

NODES = ("a", "a", "b", "b")
KEYS = {1: ("a", 11), 2: ("a", 12), 3: ("b", 11), 4: ("b", 12)}
"""By number, as the coordinator tells processes of several nodes apart; by rank one less."""


def placed(generation: int, tp: int = 1) -> Topology:
    return place_replicas([Layout(tp=tp)] * (4 // tp), generation, NODES)


def held(
    generation: int,
    step: int,
    suspects: Sequence[int],
    dealt: Sequence[Sequence[int]],
    again: bool = True,
) -> dict[int, HeldState]:
    bad = RejectedStep(step, "is not finite", tuple(map(tuple, dealt)), tuple(suspects), again)
    return {
        key: HeldState(
            generation,
            key - 1,
            step - 1,
            kind="non_finite",
            state=(generation, key - 1),
            bad=None if key == 2 else bad,
        )
        for key in KEYS
    }


def seated(*order: int) -> dict[int, tuple[str, int]]:
    """By rank, who sits there."""
    return {rank: KEYS[key] for rank, key in enumerate(order)}


FIRST = ((0, 1), (2, 3), (4, 5), (6, 7))
AGAIN = ((0, 2), (1, 3), (4, 5), (6, 7))


def test_suspects_are_to_be_computed_by_others_wherever_their_processes_sit_then() -> None:
    doubting = BadStepTracker()
    doubting.observe(placed(1), held(1, 5, [1], FIRST), KEYS)
    retry = doubting.retry(placed(2), seated(3, 1, 2, 4))
    assert not len(doubting.skips)
    assert retry is not None
    assert (retry.step, retry.avoid) == (5, {1: (1,)})
    passed = retry.if_passed
    assert passed is not None
    assert (passed.blame, passed.devices) == ("device", ("process 11 on a",))
    without = {2: KEYS[2], 3: KEYS[4]}  # who computed it does not take part
    again = doubting.retry(placed(2), without)
    assert again is not None
    assert again.avoid == {}
    assert doubting.take_events() == []


def test_the_ranks_of_a_replica_are_accused_together() -> None:
    doubting = BadStepTracker()
    doubting.observe(placed(1, tp=2), held(1, 5, [1], ((0, 1), (2, 3))), KEYS)
    retry = doubting.retry(placed(2, tp=2), seated(3, 4, 1, 2))
    assert retry is not None
    assert retry.avoid == {1: (1,)}
    assert retry.if_passed is not None
    assert retry.if_passed.devices == ("processes 11, 12 on a",)


def test_what_is_bad_everywhere_is_left_out_of_every_generation_from_then_on() -> None:
    doubting = BadStepTracker()
    doubting.observe(placed(1), held(1, 5, [1], FIRST), KEYS)
    doubting.observe(placed(1), held(1, 5, [1], FIRST), KEYS)  # it could not be made at once
    assert doubting.take_events() == [], "nothing is known after one time"
    doubting.observe(placed(2), held(2, 5, [1], AGAIN), KEYS)
    (event,) = doubting.take_events()
    assert isinstance(event, Blamed)
    assert (event.step, event.blame, event.microbatches) == (5, "data", [1])
    skips = doubting.skips
    assert [(skip.step, skip.microbatch) for skip in skips] == [(5, 1)]
    later = BadStepTracker()  # of another term
    later.load_record(GenerationRecord(placed(3), skips=skips))
    assert later.retry(placed(9), {}) is None
    assert later.skips == skips


def test_who_is_wrong_with_any_data_is_not_to_be_used() -> None:
    doubting = BadStepTracker()
    doubting.observe(placed(1), held(1, 5, [0, 1], FIRST), KEYS)
    assert doubting.faulty_workers == frozenset()
    doubting.observe(placed(2), held(2, 5, [2, 3], ((2, 3), (0, 1), *FIRST[2:])), KEYS)
    assert doubting.faulty_workers == {("a", 11)}
    (event,) = doubting.take_events()
    assert isinstance(event, Blamed)
    assert (event.blame, event.devices) == ("device", ["process 11 on a"])
    doubting.observe(placed(3), {1: HeldState(3, 0, 5, state=(3, 0))}, KEYS)
    assert doubting.faulty_workers == frozenset(), "the step has passed"


def test_what_cannot_be_mended_ends_the_run_with_a_sentence() -> None:
    doubting = BadStepTracker()
    doubting.observe(placed(1), held(1, 5, range(8), FIRST), KEYS)
    with pytest.raises(
        RunEndedError, match=r"most of its microbatches.*the state before that step"
    ):
        doubting.observe(placed(2), held(2, 5, range(8), (*FIRST[1:], FIRST[0])), KEYS)


def test_a_step_of_an_older_generation_is_no_news() -> None:
    doubting = BadStepTracker()
    doubting.observe(placed(2), held(1, 5, [1], FIRST), KEYS)
    doubting.observe(None, held(1, 5, [1], FIRST), KEYS)
    assert not len(doubting.skips)
    assert doubting.retry(placed(3), seated(1, 2, 3, 4)) is None

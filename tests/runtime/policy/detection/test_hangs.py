"""Who has stopped is named within three normal steps and a second; nobody else ever is."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from holdfast.policy.detection.bad_steps import Culprit, Trial, assign_blame
from holdfast.policy.detection.hangs import (
    SLOW_PHASE_LIMIT_FACTOR,
    ProgressMark,
    find_deadlock,
    find_furthest_behind,
    find_hung,
    find_stopped,
    normal_step_s,
    stopped_process_limit,
)

STEPS = [0.2] * 32


def marks(behind: ProgressMark, others: float = 10.0) -> dict[int, ProgressMark]:
    return {
        0: ProgressMark(7, others),
        1: ProgressMark(7, others - 0.05),
        2: behind,
        3: ProgressMark(7, others),
    }


def test_who_has_stopped_is_named_within_three_steps_and_a_second() -> None:
    stuck = marks(ProgressMark(6, 9.9))
    assert find_stopped(stuck, STEPS, 11.5) == {}
    assert find_stopped(stuck, STEPS, 11.7) == {2: pytest.approx(1.7)}
    frozen = marks(ProgressMark(6, 9.9, cpu_seconds=0.0))
    assert list(find_stopped(frozen, STEPS, 11.7)) == [2]


def test_nobody_is_named_while_all_are_slow() -> None:
    everybody = {who: ProgressMark(6, 10.0) for who in range(4)}
    assert find_stopped(everybody, STEPS, 100.0) == {}
    assert find_stopped(marks(ProgressMark(6, 9.9)), [], 100.0) == {}, (
        "the first step has not passed"
    )
    one = {
        0: ProgressMark(7, 10.0),
        1: ProgressMark(6, 9.0),
        2: ProgressMark(6, 9.0),
        3: ProgressMark(5, 9.0),
    }
    assert find_stopped(one, STEPS, 100.0) == {}, "one that waits for three is no proof"


def test_what_is_normal_follows_the_load() -> None:
    assert normal_step_s([]) is None
    assert normal_step_s([0.2] * 30 + [9.0]) == 0.2
    assert normal_step_s([0.2] * 30 + [1.0] * 4) == 1.0
    assert find_stopped(marks(ProgressMark(6, 9.9)), [0.2] * 30 + [1.0] * 4, 13.9) == {}
    assert find_stopped(marks(ProgressMark(6, 9.9)), STEPS, 13.0, wakeup_lag_s=2.0) == {}


def test_who_is_short_of_cores_is_not_named_but_who_spins_is() -> None:
    starved = marks(ProgressMark(6, 9.9, cpu_seconds=0.5))
    assert find_stopped(starved, STEPS, 15.0) == {}
    spins = marks(ProgressMark(6, 9.9, cpu_seconds=5.0))
    assert list(find_stopped(spins, STEPS, 15.0)) == [2]


def test_who_waits_for_the_one_that_stopped_is_not_named() -> None:
    half = {
        0: ProgressMark(7, 10.0),
        1: ProgressMark(7, 10.0),
        2: ProgressMark(6, 9.9, is_waiting=True),
        3: ProgressMark(6, 9.8),
    }
    assert list(find_stopped(half, STEPS, 13.0)) == [3]


def test_inside_a_replica_the_one_is_named_that_its_partners_sleep_for() -> None:
    """Of two ranks, of three in unequal replicas, of two stages that count differently."""
    hangs, sleeps = (
        ProgressMark(6, 9.9, cpu_seconds=0.0),
        ProgressMark(6, 9.9, cpu_seconds=0.0, is_blocked_in_collective=True),
    )
    for here in (
        {0: sleeps, 1: hangs},
        {0: sleeps, 1: hangs, 2: ProgressMark(7, 10.0, is_waiting=True)},
        {0: replace(sleeps, point=5), 1: hangs, 2: ProgressMark(7, 10.0, is_waiting=True)},
        {0: replace(sleeps, point=5), 1: hangs},
    ):
        assert find_stopped(here, STEPS, 11.5) == {}
        assert list(find_stopped(here, STEPS, 12.0)) == [1]
        busy = here | {1: replace(hangs, cpu_seconds=0.5)}
        assert find_stopped(busy, STEPS, 12.0) == {}, "it computes, and is short of cores"
    both = {
        0: sleeps,
        1: sleeps,
        2: ProgressMark(7, 10.0, is_waiting=True),
        3: ProgressMark(7, 10.0, is_waiting=True),
    }
    assert find_stopped(both, STEPS, 12.0) == {}, "who of them hangs may still be told"
    assert list(find_stopped(both, STEPS, 13.5)) == [0, 1]
    assert find_stopped({0: sleeps, 1: sleeps}, STEPS, 13.5) == {}, "nothing says who"


@pytest.mark.parametrize("load", [1.0, 3.0, 8.0])
def test_a_load_on_all_cores_excludes_nobody(load: float) -> None:
    """Two thousand steps of four workers on two cores, looked at ten times a second."""
    rng = random.Random(int(load))
    past: list[float] = []
    now = 0.0
    for step in range(2000):
        busy = load if step % 2000 >= 1000 else 1.0
        ends = [now + 0.2 * busy * math.exp(rng.gauss(0, 0.3)) for _ in range(4)]
        at = now
        while at < max(ends):
            at += 0.1
            here = {
                who: ProgressMark(step + 1, end)
                if end <= at
                else ProgressMark(step, now, (at - now) / (2 * busy))
                for who, end in enumerate(ends)
            }
            assert find_stopped(here, past[-32:], at) == {}
        past.append(max(ends) - now)
        now = max(ends)


# --- who is not heard ---------------------------------------------------------------------------
def test_who_is_not_heard_while_others_wait_is_named_wherever_it_stands() -> None:
    """It may have come to the same collective as the others, and hold the interpreter there."""
    here = {who: ProgressMark(7, 10.0, cpu_seconds=0.0, is_waiting=True) for who in range(4)}
    assert find_hung(here, 0.2, 20.0) == {}, "all are heard: they wait for something else"
    here[2] = ProgressMark(7, 9.9, cpu_seconds=0.0, is_waiting=True, silent_for_s=1.5)
    assert find_hung(here, 0.2, 11.5) == {}
    here[2] = ProgressMark(7, 9.9, cpu_seconds=0.0, is_waiting=True, silent_for_s=1.7)
    (found,) = find_hung(here, 0.2, 11.7).items()
    assert (found[0], found[1].sign) == (2, "silent")


def test_who_is_not_heard_while_the_others_work_or_is_short_of_cores_is_not_named() -> None:
    quiet = ProgressMark(7, 9.9, cpu_seconds=0.0, silent_for_s=5.0)
    busy = {who: ProgressMark(7, 9.9, cpu_seconds=4.0) for who in range(3)}
    assert find_hung({**busy, 3: quiet}, 0.2, 15.0) == {}
    waits = {who: ProgressMark(8, 9.9, is_waiting=True) for who in range(3)}
    starved = ProgressMark(7, 9.9, cpu_seconds=0.6, silent_for_s=5.0)
    assert find_hung({**waits, 3: starved}, 0.2, 15.0) == {}
    assert list(find_hung({**waits, 3: quiet}, 0.2, 15.0)) == [3]
    assert find_hung({**waits, 3: quiet}, None, 15.0) == {}, "the first step has not passed"


def test_threads_that_look_for_the_interpreters_lock_do_not_make_it_a_worker_that_runs() -> None:
    """They took 0.05 of a core, and whoever held the lock was named after 69 s."""
    waits = {who: ProgressMark(8, 9.9, is_waiting=True) for who in range(2)}
    for seconds in (5.0, 20.0, 60.0):
        holds = ProgressMark(7, 9.9, cpu_seconds=0.06 * seconds, silent_for_s=seconds)
        found = find_hung({**waits, 2: holds}, 0.8, 9.9 + seconds)
        assert [(who, one.sign) for who, one in found.items()] == [(2, "silent")]


def test_the_surest_sign_counts_and_work_that_may_take_long_has_longer() -> None:
    here = {
        0: ProgressMark(8, 10.0, is_waiting=True),
        1: ProgressMark(8, 10.0, is_waiting=True),
        2: ProgressMark(7, 10.0, cpu_seconds=0.0),
        3: ProgressMark(7, 10.0, cpu_seconds=0.0, silent_for_s=9.0),
    }
    assert list(find_hung(here, 0.2, 20.0)) == [3]
    spins = here | {3: ProgressMark(7, 10.0, cpu_seconds=9.0)}
    assert list(find_hung(spins, 0.2, 20.0)) == [3], "2 idles, so it waits for 3"
    saves = {
        0: ProgressMark(8, 10.0, is_waiting=True),
        1: ProgressMark(7, 10.0, cpu_seconds=0.0, limit_factor=SLOW_PHASE_LIMIT_FACTOR),
    }
    assert find_hung(saves, 0.2, 20.0) == {}
    assert list(find_hung(saves, 0.2, 27.0)) == [1]


def test_where_all_stand_still_for_long_the_one_that_got_least_far_is_named() -> None:
    here = {
        0: ProgressMark(7, 10.0, is_waiting=True),
        1: ProgressMark(7, 9.0, is_waiting=True),
        2: ProgressMark(7, 11.0),
    }
    assert find_furthest_behind(here, 60.0, 50.0) is None
    assert find_furthest_behind(here, 62.0, 50.0) == 1
    assert find_furthest_behind({}, 62.0, 50.0) is None


def test_a_process_that_is_stopped_is_given_up_sooner() -> None:
    assert stopped_process_limit(0.2) < 3 * 0.2 + 1.0
    assert stopped_process_limit(None) > 1.0
    assert stopped_process_limit(0.2, wakeup_lag_s=0.5) == stopped_process_limit(0.2) + 0.5


def test_where_all_are_heard_and_wait_all_are_stuck_and_nobody_is_named() -> None:
    here = {who: ProgressMark(7, 10.0, cpu_seconds=0.0, is_waiting=True) for who in range(4)}
    assert find_hung(here, 0.2, 99.0) == {}
    assert find_deadlock(here, 0.2, 14.7) is None
    assert find_deadlock(here, 0.2, 15.0) == 5.0
    assert find_deadlock(here | {2: ProgressMark(7, 10.0, cpu_seconds=4.0)}, 0.2, 15.0) is None, (
        "one computes"
    )
    assert find_deadlock(here | {2: ProgressMark(7, 14.0, is_waiting=True)}, 0.2, 15.0) is None, (
        "one came on"
    )
    assert (
        find_deadlock(
            here
            | {2: ProgressMark(7, 10.0, is_waiting=True, limit_factor=SLOW_PHASE_LIMIT_FACTOR)},
            0.2,
            15.0,
        )
        is None
    )


# --- data or device -------------------------------------------------------------------------------
def trials(words: str) -> list[Trial]:
    """ "a- b+" was bad on a, then good on b."""
    return [Trial(word[0], word[1] == "-") for word in words.split()]


@pytest.mark.parametrize(
    ("words", "blame"),
    [
        ("a-", Culprit.UNKNOWN),
        ("a- a-", Culprit.UNKNOWN),
        ("a- b-", Culprit.DATA),
        ("a- a- b- c-", Culprit.DATA),
        ("a- b+", Culprit.DEVICE),
        ("a- b+ a-", Culprit.DEVICE),
        ("a- b+ a+", Culprit.DEVICE),
        ("a- b- c+", Culprit.UNKNOWN),
        ("a- a+", Culprit.DEVICE),
        ("a+ b- a-", Culprit.UNKNOWN),
        ("a+ b-", Culprit.DEVICE),
    ],
)
def test_verdicts(words: str, blame: Culprit) -> None:
    found = assign_blame(trials(words))
    assert found.blame is blame
    assert found.device == next(word[0] for word in words.split() if word[1] == "-")


@pytest.mark.parametrize(
    ("words", "blame"),
    [("a-", Culprit.UNKNOWN), ("a- a-", Culprit.DATA), ("a- a+ a-", Culprit.DEVICE)],
)
def test_where_there_is_one_device_only_data_that_stays_bad_is_to_blame(
    words: str, blame: Culprit
) -> None:
    assert assign_blame(trials(words), only_device=True).blame is blame


def test_a_verdict_is_a_sentence() -> None:
    assert assign_blame(trials("a- a- b+")).reason == "bad on a, 2 times; good on b"
    assert assign_blame(trials("a- b-")).reason == "bad on a and b, 2 times; good nowhere"


def test_without_a_fault_there_is_no_blame() -> None:
    with pytest.raises(ValueError, match="nothing was bad"):
        assign_blame(trials("a+ b+"))

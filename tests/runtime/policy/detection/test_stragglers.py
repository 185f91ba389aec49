"""Slow workers are found on simulated traces, and loaded machines exclude nobody."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest

from holdfast.policy.detection.stragglers import (
    PACE_TRANSITIONS,
    Pace,
    PaceChange,
    StepTiming,
    StragglerDetector,
    StragglerLimits,
    advance,
)


def shared_machine(seed: int, workers: int, steps: int) -> Iterator[list[float]]:
    """Seconds per microbatch on two cores that others use, too: log-normal, each worker with a
    drift of its own, bursts of load on both cores, and now and then one very slow step."""
    rng = random.Random(seed)
    drift, burst, load = [0.0] * workers, 0, 1.0
    for _ in range(steps):
        if burst == 0 and rng.random() < 0.01:
            burst, load = rng.randint(5, 300), rng.uniform(1.5, 6)
        burst = max(0, burst - 1)
        now = load if burst else 1.0
        row: list[float] = []
        for worker in range(workers):
            drift[worker] = 0.9 * drift[worker] + rng.gauss(0, 0.04)
            noise = rng.gauss(0, 0.3 if now == 1.0 else 0.45)
            hiccup = rng.uniform(3, 20) if rng.random() < 0.01 else 1.0
            row.append(0.02 * now * hiccup * math.exp(noise + drift[worker]))
        yield row


def fed(paces: list[float], microbatches: int = 2) -> list[StepTiming]:
    return [
        StepTiming(who, "same", pace * microbatches, microbatches) for who, pace in enumerate(paces)
    ]


def run(
    found: StragglerDetector, trace: Iterator[list[float]], who: int = 1, slower: float = 1.0
) -> list[tuple[int, PaceChange]]:
    """(step, change) with one worker slowed down; one without a rank is not timed."""
    out: list[tuple[int, PaceChange]] = []
    for step, paces in enumerate(trace, 1):
        paces[who] *= slower
        timings = [t for t in fed(paces) if t.worker not in found.excluded]
        out += [(step, change) for change in found.observe(timings)]
    return out


@pytest.mark.parametrize("workers", [2, 4])
def test_a_loaded_machine_makes_nobody_slow_in_20_000_steps(workers: int) -> None:
    assert run(StragglerDetector(), shared_machine(workers, workers, 20_000)) == []


@pytest.mark.parametrize(("slower", "steps"), [(1.5, 400), (3.0, 64), (10.0, 24)])
@pytest.mark.parametrize("workers", [2, 4, 8])
def test_a_slow_worker_is_found(slower: float, steps: int, workers: int) -> None:
    for seed in range(5):
        found = StragglerDetector()
        run(found, shared_machine(seed, workers, 96))
        changes = run(found, shared_machine(100 + seed, workers, steps), slower=slower)
        assert [(c.worker, c.after) for _, c in changes][:1] == [(1, Pace.SLOW)]
        assert all(change.worker == 1 for _, change in changes)


def long_steps(seed: int, workers: int, steps: int) -> Iterator[list[float]]:
    """The same machine with steps of seconds."""
    return ([100 * pace for pace in row] for row in shared_machine(seed, workers, steps))


def test_long_steps_find_a_very_slow_worker_early_and_make_nobody_slow() -> None:
    assert run(StragglerDetector(), long_steps(2, 2, 4_000)) == []
    for seed in range(5):
        found = StragglerDetector()
        run(found, long_steps(seed, 4, 96))
        changes = run(found, long_steps(100 + seed, 4, 12), slower=10.0)
        assert [(c.worker, c.after) for _, c in changes] == [(1, Pace.SLOW)]


def test_fewer_microbatches_then_standby_then_out() -> None:
    found = StragglerDetector(StragglerLimits(standby_blocks=8))
    changes = run(found, shared_machine(3, 4, 400), slower=3.0)
    assert [c.after for _, c in changes] == [Pace.SLOW, Pace.STANDBY, Pace.TRIAL, Pace.OUT]
    assert changes[0][1].reason.startswith("3")
    assert "times slower than the others in the last" in changes[0][1].reason
    assert found.excluded == {1: Pace.OUT}
    assert found.speeds == {}


def test_one_that_is_a_little_slow_gets_less_and_stays() -> None:
    found = StragglerDetector()
    changes = run(found, shared_machine(3, 4, 2000), slower=1.6)
    assert [c.after for _, c in changes] == [Pace.SLOW]
    assert 0.5 < found.speeds[1] < 0.8
    assert not found.excluded


def test_who_is_quick_again_is_well_again() -> None:
    found = StragglerDetector()
    run(found, shared_machine(3, 4, 240), slower=1.7)
    assert found.pace(1) is Pace.SLOW
    changes = run(found, shared_machine(4, 4, 240))
    assert [c.after for _, c in changes] == [Pace.WELL]
    assert found.speeds == {}


def test_who_is_quick_after_a_rest_is_well_again() -> None:
    found = StragglerDetector(StragglerLimits(standby_blocks=8))
    run(found, shared_machine(3, 4, 96), slower=5.0)
    assert found.excluded == {1: Pace.STANDBY}
    changes = run(found, shared_machine(4, 4, 240))
    assert [c.after for _, c in changes] == [Pace.TRIAL, Pace.WELL]


def test_other_work_is_not_compared() -> None:
    """The last stage of a pipeline has the head: it is slower, and nobody's fault."""
    found = StragglerDetector()
    for _ in range(400):
        assert not found.observe(
            [
                StepTiming(replica * 2 + stage, stage, 1.0 + 4 * stage, 1)
                for replica in range(2)
                for stage in range(2)
            ]
        )
    alone = StragglerDetector()
    for _ in range(400):
        assert not alone.observe([StepTiming(0, "first", 1.0, 1), StepTiming(1, "last", 9.0, 1)])


def test_who_computes_more_microbatches_is_not_slow() -> None:
    found = StragglerDetector()
    for _ in range(400):
        assert not found.observe(
            [StepTiming(0, "", 1.0, 1), StepTiming(1, "", 4.0, 4), StepTiming(2, "", 0, 0)]
        )


def test_transitions_are_those_of_the_table() -> None:
    for before in Pace:
        for after in Pace:
            if after in PACE_TRANSITIONS[before]:
                assert advance(before, after) is after
            else:
                with pytest.raises(ValueError, match="cannot become"):
                    advance(before, after)

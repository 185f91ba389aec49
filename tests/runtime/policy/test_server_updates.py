"""The rules of parameter servers, run as they are by a simulated clock."""

from __future__ import annotations

import heapq
import random
from itertools import count

import pytest

from holdfast.config.sections.server import ParameterServerConfig
from holdfast.policy.server_updates import (
    Adaptation,
    StepMeasures,
    UpdateRule,
    adapt,
    rate_factor,
    stale_part,
    straggling_of,
)

WORKERS, MICROBATCHES = 4, 100_000


def _staleness_of_updates(rule: UpdateRule, seed: int) -> tuple[list[int], int]:
    """Let workers compute for random times, some of them very long. Return the staleness of each
    update, and the most microbatches that one worker was ahead of another one that had work."""
    chooser, numbers = random.Random(seed), count()
    shares = [range(k, rule.microbatches, WORKERS) for k in range(WORKERS)]
    orders = [rule.order(share) for share in shares]
    done, base, version, lead = [0] * WORKERS, [0] * WORKERS, 0, 0
    staleness: list[int] = []
    waiting: set[int] = set()
    ends: list[tuple[float, int, int]] = []

    def begin(worker: int, now: float) -> None:
        base[worker] = version
        seconds = chooser.expovariate(1.0) * (50.0 if chooser.random() < 0.01 else 1.0)
        heapq.heappush(ends, (now + seconds, next(numbers), worker))

    for worker in range(WORKERS):
        begin(worker, 0.0)
    while ends:
        now, _, worker = heapq.heappop(ends)
        staleness.append(version - base[worker])
        version += 1
        done[worker] += 1
        waiting.add(worker)
        for other in sorted(waiting):
            if done[other] == len(orders[other]):
                waiting.discard(other)
                continue
            rest = [done[k] for k in range(WORKERS) if k != other and done[k] < len(orders[k])]
            if rule.may_continue(orders[other], done[other], version, rest):
                lead = max(lead, done[other] - min(rest, default=done[other]))
                waiting.discard(other)
                begin(other, now)
    assert version == rule.microbatches
    return staleness, lead


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_staleness_stays_within_its_bound_in_a_hundred_thousand_updates(bound: int) -> None:
    rule = UpdateRule(MICROBATCHES, is_synchronous=False, width=1, staleness=bound)
    staleness, lead = _staleness_of_updates(rule, seed=bound)
    assert len(staleness) == MICROBATCHES
    assert max(staleness) <= rule.largest_staleness(WORKERS) == 3 * (2 * bound + 1)
    assert lead == bound, "some worker uses all of it"
    assert max(staleness) > WORKERS - 1 or bound == 0


def test_neighbours_belong_to_unlike_synchronous_updates() -> None:
    rule = UpdateRule(12, is_synchronous=True, width=3, staleness=0)
    assert rule.updates == 4
    assert [rule.update_of(j) for j in range(5)] == [0, 1, 2, 3, 0]
    assert rule.order([6, 7, 8]) == [8, 6, 7]
    assert rule.asks_for_weights([6, 7], 0), "its first update is the third of the step"
    assert not rule.may_continue([6, 7], 0, 1, [])
    assert rule.may_continue([6, 7], 0, 2, [])
    assert rule.largest_staleness(5) == 0


def test_rates_follow_the_microbatches_that_a_gradient_counts_as() -> None:
    assert rate_factor("linear", 8, 2) == 4
    assert rate_factor("sqrt", 8, 2) == 2
    assert rate_factor("none", 8, 2) == 1
    assert rate_factor("linear", 1, 4) == 1 / 4, "one of the four of an update"
    assert stale_part("linear", 3, 4) == 1, "no more than the gradients of an update"
    assert stale_part("linear", 7, 4) == 1 / 2
    assert stale_part("sqrt", 3, 4) == 1 / 4


def test_an_update_grows_when_the_noise_is_as_large() -> None:
    config = ParameterServerConfig(
        mode="synchronous", update_microbatches=2, max_update_microbatches=8, noise_decay=0
    )
    rule = UpdateRule(16, is_synchronous=True, width=2, staleness=0)

    def after(signal: float, noise: float) -> Adaptation:
        """noise: trace of the covariance of a sample's gradient; microbatches have 3 samples."""
        measures = StepMeasures(3, signal + noise / 3, signal + noise / 6, straggling=0.0)
        return adapt(config, Adaptation.first(config), rule, measures)

    assert after(1.0, 11.0).width == 2
    assert after(1.0, 11.0).noise_scale == pytest.approx(11.0)
    assert after(1.0, 12.5).width == 4, "the next update has 12 samples"
    assert after(1.0, 12.5).updates == 8
    assert after(-0.1, 12.5).width == 2, "a signal that is lost in noise says nothing"
    widest = Adaptation(updates=0, width=8)
    assert adapt(config, widest, rule, StepMeasures(3, 100.0, 1.0, 0.0)).width == 8


def test_a_run_switches_by_straggling_and_does_not_flutter() -> None:
    config = ParameterServerConfig(mode="switching", straggling=0.4)
    rule, now = UpdateRule(8, True, 1, 2), Adaptation.first(config)
    assert now.is_synchronous
    modes = []
    for straggling in (0.3, 0.5, 0.3, 0.1, 0.3):
        now = adapt(config, now, rule, StepMeasures(1, 0.0, 0.0, straggling))
        modes.append(now.is_synchronous)
    assert modes == [True, False, False, True, True]


def test_straggling_is_the_time_that_lockstep_loses() -> None:
    assert straggling_of([[1.0, 1.0], [1.0, 1.0]]) == 0.0
    assert straggling_of([[1.0, 3.0], [3.0, 1.0, 9.0]]) == pytest.approx(0.5)
    assert straggling_of([[], [1.0]]) == 0.0

"""Trials: a simulated run with a fault in its data or in a device, driven by the decisions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from holdfast.core.data.skips import Skip, Skips
from holdfast.core.sharding.step_resume import deal_away_from
from holdfast.policy.detection.bad_steps import (
    BadStep,
    BadStepAction,
    BadStepDecision,
    BadStepLimits,
    BadStepPolicy,
    Culprit,
    Finding,
    StepRetry,
)
from holdfast.policy.detection.loss_spikes import LossJumpLimits, find_loss_jump
from holdfast.policy.recovery.survivors import HeldState, RejectedStep

LEAVES = 4
Fault = Callable[[int, int, str, int], bool]
"""(step, microbatch, device, attempt) -> whether it is bad there."""


@dataclass
class Run:
    """Trains as the decisions say. blind: what comes again at once is not seen to."""

    fault: Fault
    devices: tuple[str, ...] = ("a", "b")
    leaves: int = LEAVES
    bearable: bool = False
    rests: bool = True  # who is to be left out is
    trials: BadStepPolicy = field(default_factory=BadStepPolicy)
    log: list[BadStepDecision] = field(default_factory=list)
    named: list[Finding] = field(default_factory=list)
    step: int = 1

    def train(self, steps: int) -> bool:
        """Whether it came to its end."""
        attempt = 0
        while self.step <= steps:
            attempt += 1
            assert attempt < 50, "it never came to its end"
            decision = self.trials.pending_decision
            where, bad = self._compute(decision, attempt)
            accepted = decision is not None and decision.action is BadStepAction.ACCEPT
            if bad and not accepted:
                again = any(self.fault(self.step, leaf, where[leaf], attempt + 1) for leaf in bad)
                told = BadStep(self.step, "is not finite", where, bad, again, self.bearable)
                self.log.append(found := self.trials.step_failed(told))
                if found.finding is not None:
                    self.named.append(found.finding)
                if found.action is BadStepAction.GIVE_UP:
                    return False
                if self.rests and len(self.devices) > len(set(found.excluded_devices)):
                    self.devices = tuple(d for d in self.devices if d not in found.excluded_devices)
                continue
            if decision is not None and decision.finding_if_passed is not None:
                self.named.append(decision.finding_if_passed)
            self.trials.step_passed(self.step)
            self.step, attempt = self.step + 1, 0
        return True

    def _compute(
        self, decision: BadStepDecision | None, attempt: int
    ) -> tuple[dict[int, str], frozenset[int]]:
        number = len(self.devices)
        shares = tuple(tuple(range(at, self.leaves, number)) for at in range(number))
        if decision is not None:
            avoid = {
                leaf: [self.devices.index(device)]
                for leaf, device in decision.avoided_devices.items()
                if device in self.devices
            }
            shares = deal_away_from(shares, avoid)
        where = {leaf: self.devices[at] for at, share in enumerate(shares) for leaf in share}
        skips = self.trials.skips
        bad = frozenset(
            leaf
            for leaf, device in where.items()
            if not skips.reason(self.step, leaf) and self.fault(self.step, leaf, device, attempt)
        )
        return where, bad


def what(run: Run) -> list[tuple[int, str]]:
    return [(decision.step, decision.action.value) for decision in run.log]


def test_data_that_is_bad_everywhere_is_skipped_with_its_reason() -> None:
    run = Run(lambda step, leaf, device, attempt: (step, leaf) == (8, 2))
    assert run.train(20)
    assert what(run) == [(8, "again"), (8, "skip")]
    (skip,) = run.trials.skips
    assert (skip.step, skip.microbatch) == (8, 2)
    assert skip.reason == "step 8 is not finite: bad on a and b, 4 times; good nowhere"
    assert [(found.blame, found.microbatches) for found in run.named] == [(Culprit.DATA, (2,))]


def test_what_does_not_come_again_is_the_device_s() -> None:
    run = Run(lambda step, leaf, device, attempt: (step, leaf, attempt) == (8, 1, 1))
    assert run.train(20)
    assert what(run) == [(8, "again")]
    assert [(f.step, f.blame, f.devices) for f in run.named] == [(8, Culprit.DEVICE, ("b",))]
    assert len(run.trials.skips) == 0


def test_a_device_that_is_bad_with_any_data_is_left_out_at_once() -> None:
    run = Run(lambda step, leaf, device, attempt: device == "b" and step >= 8)
    assert run.train(20)
    assert what(run) == [(8, "again"), (8, "again")]
    assert run.devices == ("a",)
    assert [(f.blame, f.devices) for f in run.named] == [(Culprit.DEVICE, ("b",))]
    assert len(run.trials.skips) == 0, "no data is skipped for it"


def test_a_device_that_errs_now_and_then_is_left_out_in_the_end() -> None:
    run = Run(lambda step, leaf, device, attempt: device == "b" and step % 3 == 0 and attempt == 1)
    assert run.train(40)
    assert [f.blame for f in run.named] == [Culprit.DEVICE] * len(run.named)
    assert run.devices == ("a",)
    assert {f.step for f in run.named} == {3, 6, 9, 12}, "the fourth time it is not used any more"


def test_one_device_alone() -> None:
    """It is done again once; then there is nothing else to try."""
    run = Run(lambda step, leaf, device, attempt: (step, leaf) == (8, 2), devices=("a",))
    assert run.train(20)
    assert what(run) == [(8, "again"), (8, "skip")]
    once = Run(lambda *at: (at[0], at[1], at[3]) == (8, 2, 1), devices=("a",))
    assert once.train(20)
    assert what(once) == [(8, "again")]
    assert [f.blame for f in once.named] == [Culprit.DEVICE]


@pytest.mark.parametrize("devices", [("a",), ("a", "b")])
def test_most_of_a_step_is_not_the_data(devices: tuple[str, ...]) -> None:
    run = Run(lambda step, leaf, device, attempt: step >= 8, devices=devices)
    assert not run.train(20)
    assert what(run) == [(8, "again"), (8, "give up")]
    assert "most of its microbatches" in run.log[-1].reason
    assert len(run.trials.skips) == 0


def test_bad_steps_in_a_row_end_the_run() -> None:
    """With one microbatch a step nobody can tell data from a state that is spoilt."""
    run = Run(lambda step, leaf, device, attempt: step >= 8, devices=("a",), leaves=1)
    assert not run.train(20)
    assert [skip.step for skip in run.trials.skips] == [8, 9]
    assert what(run)[-1] == (10, "give up")


def test_a_run_leaves_out_so_much_and_no_more() -> None:
    run = Run(lambda step, leaf, device, attempt: leaf == 0 and step % 2 == 0)
    run.trials = BadStepPolicy(limits=BadStepLimits(max_skips=3))
    assert not run.train(40)
    assert [skip.step for skip in run.trials.skips] == [2, 4, 6]
    assert "after 3 microbatches were left out" in run.log[-1].reason


def test_what_nothing_can_be_told_of_is_given_up() -> None:
    """Every part is finite, and their sum is not."""
    trials = BadStepPolicy()
    bad = BadStep(3, "is not finite", {0: "a", 1: "b"}, frozenset())
    assert [trials.step_failed(bad).action for _ in range(3)] == [
        BadStepAction.RETRY,
        BadStepAction.RETRY,
        BadStepAction.GIVE_UP,
    ]


def test_a_jump_that_stays_is_lived_with() -> None:
    run = Run(lambda step, leaf, device, attempt: step == 8, bearable=True)
    assert run.train(20)
    assert what(run) == [(8, "again"), (8, "accept")]
    assert [f.blame for f in run.named] == [Culprit.UNKNOWN]


def test_another_step_that_is_bad_says_that_the_one_before_has_passed() -> None:
    trials = BadStepPolicy()
    bad = BadStep(3, "is not finite", {0: "a", 1: "b"}, frozenset({0}))
    trials.step_failed(bad)
    assert trials.step_failed(replace(bad, step=4)).action is BadStepAction.RETRY, (
        "as if it were the first time"
    )


def test_nothing_is_said_of_steps_before_it_has_passed() -> None:
    trials = BadStepPolicy()
    trials.step_failed(BadStep(3, "is not finite", {0: "a", 1: "b"}, frozenset({0})))
    trials.step_passed(2)
    assert trials.pending_decision is not None
    trials.step_passed(3)
    assert trials.pending_decision is None


@pytest.mark.parametrize(
    ("shares", "avoid", "found"),
    [
        (((0, 1), (2, 3)), {}, ((0, 1), (2, 3))),
        (((0, 1), (2, 3)), {1: [0]}, ((0, 2), (1, 3))),
        (((0, 1), (2, 3)), {0: [0], 1: [0]}, ((2, 3), (0, 1))),
        (((0, 1), (2, 3)), {0: [0, 1]}, ((0, 1), (2, 3))),
        (((0, 1, 2), (3,)), {0: [0], 1: [0]}, ((1, 2, 3), (0,))),
        (((0,), (1,), (2,)), {0: [0, 1]}, ((2,), (1,), (0,))),
        (((0, 1),), {0: [0]}, ((0, 1),)),
        (((0, 1), (2, 3)), {0: [0], 2: [1]}, ((1, 2), (0, 3))),
        (((0, 1), (2, 3)), {9: [0]}, ((0, 1), (2, 3))),
    ],
)
def test_suspects_are_computed_elsewhere_and_all_have_as_much_to_do(
    shares: tuple[tuple[int, ...], ...], avoid: dict[int, list[int]], found: object
) -> None:
    assert deal_away_from(shares, avoid) == found


def test_what_travels_as_json_comes_back() -> None:
    said = Finding(3, Culprit.DEVICE, (1, 2), ("process 7 on a",), "why")
    for retry in (StepRetry(3, {1: (0, 2)}, True, said), StepRetry(4)):
        assert StepRetry.from_json(retry.to_json()) == retry
    bad = RejectedStep(3, "is not finite", ((0, 1), (2,)), (1,), True)
    held = HeldState(2, 1, 5, kind="non_finite", state=(2, 1), bad=bad)
    assert HeldState.from_json(held.to_json()) == held


def test_skips_are_kept_as_json() -> None:
    skips = Skips([Skip(3, 1, "why"), Skip(2, 0, "because"), Skip(3, 1, "later")])
    assert Skips.from_json(skips.to_json()) == skips
    assert [(s.step, s.microbatch, s.reason) for s in skips] == [(2, 0, "because"), (3, 1, "why")]
    assert (skips.reason(3, 1), skips.reason(3, 0)) == ("why", "")
    assert len(Skips.from_json(None)) == 0
    with pytest.raises(ValueError, match="nothing is skipped without a reason"):
        Skip(1, 0, "")
    with pytest.raises(ValueError, match="step 0 has no microbatch 1"):
        Skip(0, 1, "x")


# --- what counts as a jump of the loss ------------------------------------------------------------
def falling(steps: int, seed: int = 1) -> list[float]:
    noise = random.Random(seed)
    return [1 + 4 * math.exp(-step / 100) + noise.gauss(0, 0.05) for step in range(steps)]


def test_a_quiet_run_has_no_jump() -> None:
    for seed in range(5):
        losses = falling(600, seed)
        for step in range(600):
            assert find_loss_jump(losses[max(0, step - 32) : step], [losses[step]], 1) is None, step


def test_a_loss_that_drifts_up_is_no_jump() -> None:
    losses = [1 + 0.01 * step for step in range(200)]
    for step in range(200):
        assert find_loss_jump(losses[max(0, step - 32) : step], [losses[step]], 1) is None


def test_the_microbatches_that_stand_out_are_named() -> None:
    before = falling(40)[-32:]
    found = find_loss_jump(before, [10 * 4.0, 10 * 3.7, 10 * 12.0, 10 * 3.8], 40)
    assert found is not None
    assert found.microbatches == (2,)
    assert found.loss == pytest.approx(5.875)
    assert found.threshold < found.loss


def test_where_all_have_risen_all_are_named() -> None:
    found = find_loss_jump(falling(40)[-32:], [60.0] * 4, 40)
    assert found is not None
    assert found.microbatches == (0, 1, 2, 3)


def test_a_microbatch_that_is_left_out_has_no_part_in_the_mean_of_the_others() -> None:
    before = falling(40)[-32:]
    assert find_loss_jump(before, [10 * 3.9, 10 * 3.8, 0.0, 10 * 3.9], 30) is None


def test_too_few_steps_say_nothing() -> None:
    least = LossJumpLimits().min_steps
    before = falling(40)
    assert find_loss_jump(before[: least - 1], [99.0], 1) is None
    assert find_loss_jump(before[:least], [99.0], 1) is not None

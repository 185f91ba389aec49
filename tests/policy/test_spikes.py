"""Spikes: a simulated run with a fault in its data or in a device, driven by the decisions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from holdfast.policy.blame import Blame
from holdfast.policy.spikes import TRANSITIONS, Decision, Do, Mood, Seen, Spikes, advance
from holdfast.spec.skips import Skip, Skips

LEAVES = 4
Fault = Callable[[int, int, int], float]
"""(step, microbatch, device) -> what is added to its loss."""


def healthy(step: int, leaf: int, device: int) -> float:
    return 0.0


@dataclass
class Run:
    """Trains as the decisions say. `spoils`: what a bad microbatch does to the loss of the next
    step, by way of the state."""

    fault: Fault
    devices: int = 4
    by_leaf: bool = True
    spoils: bool = False
    seed: int = 1
    spikes: Spikes = field(default_factory=Spikes)
    skips: Skips = field(default_factory=Skips)
    log: list[tuple[int, Decision]] = field(default_factory=list)
    out: set[object] = field(default_factory=set)

    def train(self, steps: int, most: int = 3000) -> None:
        """A device that is named is left out from then on."""
        step, moved, spoilt = 1, {}, {0: 0.0}
        for _ in range(most):
            if step > steps:
                return
            at = {leaf: self._device(step, leaf, moved) for leaf in range(LEAVES)}
            noise = random.Random(hash((self.seed, step)))
            losses = {
                leaf: 1 + 4 * math.exp(-step / 100) + noise.gauss(0, 0.05) + spoilt[step - 1]
                + self._added(step, leaf, at[leaf], direct=True)
                for leaf in range(LEAVES)
            }  # fmt: skip
            mean = sum(losses.values()) / LEAVES
            bad = [leaf for leaf, loss in losses.items() if not math.isfinite(loss)]
            found = self.spikes.observe(
                Seen(step, mean, at, losses if self.by_leaf else {}, at[bad[0]] if bad else None)
            )
            if found.why:
                self.log.append((step, found))
            self.skips = self.skips.with_more(found.skip)
            if found.do is Do.GIVE_UP:
                return
            if found.blame is Blame.DEVICE:
                self.out.add(found.device)
            if found.do is Do.ROLL_BACK:
                step, moved = found.to + 1, dict(found.elsewhere)
                continue
            spoilt[step] = spoilt[step - 1] * 0.5 + sum(
                self._added(step, leaf, at[leaf], direct=False) for leaf in range(LEAVES)
            )
            step += 1
        raise AssertionError("it never came to its end")

    def _device(self, step: int, leaf: int, moved: Mapping[tuple[int, int], object]) -> int:
        left = [device for device in range(self.devices) if device not in self.out]
        own = left[leaf % len(left)]
        other = left[(leaf + 1) % len(left)]
        return other if moved.get((step, leaf)) == own else own

    def _added(self, step: int, leaf: int, device: int, *, direct: bool) -> float:
        if self.skips.reason(step, leaf) or direct is self.spoils:
            return 0.0
        return self.fault(step, leaf, device)


def what(run: Run) -> list[tuple[int, str, str]]:
    return [(step, d.do.value, d.blame.value if d.blame else "") for step, d in run.log]


def test_a_quiet_run_is_left_alone() -> None:
    for seed in range(5):
        run = Run(healthy, seed=seed)
        run.train(2000)
        assert run.log == []


@pytest.mark.parametrize("value", [math.nan, math.inf, 9.0])
def test_data_that_is_bad_everywhere_is_skipped_with_its_reason(value: float) -> None:
    run = Run(lambda step, leaf, device: value if (step, leaf) == (80, 2) else 0.0)
    run.train(200)
    assert what(run) == [(80, "roll back", ""), (80, "roll back", "data"), (80, "go on", "")]
    assert [(s.step, s.microbatch) for s in run.skips] == [(80, 2)]
    (skip,) = run.skips
    assert "step 80" in skip.reason
    assert "on 1 other device bad" in skip.reason


@pytest.mark.parametrize("value", [math.nan, 9.0])
def test_a_device_that_is_bad_with_any_data_is_named(value: float) -> None:
    run = Run(lambda step, leaf, device: value if device == 1 and step >= 80 else 0.0)
    run.train(200)
    (named,) = {d.device for _, d in run.log if d.blame is Blame.DEVICE}
    assert named == 1
    assert len(run.log) == 2, "it is left out, and nothing is bad any more"
    assert len(run.skips) == 0, "no data is skipped for it"


def test_what_does_not_come_again_is_the_first_device_s() -> None:
    times = iter([math.nan])
    run = Run(lambda step, leaf, device: next(times, 0.0) if (step, leaf) == (80, 1) else 0.0)
    run.train(200)
    assert what(run) == [(80, "roll back", ""), (80, "go on", "device")]
    assert run.log[-1][1].device == 1
    assert "on 1 other device good" in run.log[-1][1].why


def test_an_update_that_spoils_the_state_is_taken_back() -> None:
    """The loss jumps a step after the data that caused it: a step earlier is gone back to, and
    all of that step is skipped, as nobody knows better."""
    run = Run(lambda step, leaf, device: 5.0 if (step, leaf) == (80, 2) else 0.0, spoils=True)
    run.train(200)
    assert [(d.do, d.to) for _, d in run.log[:2]] == [(Do.ROLL_BACK, 79), (Do.ROLL_BACK, 79)]
    assert {s.step for s in run.skips} == {80}


def test_a_jump_without_losses_of_microbatches() -> None:
    run = Run(lambda step, leaf, device: 20.0 if (step, leaf) == (80, 2) else 0.0, by_leaf=False)
    run.train(200)
    assert [(d.do, d.to) for _, d in run.log[:2]] == [(Do.ROLL_BACK, 78), (Do.ROLL_BACK, 78)]
    assert {s.step for s in run.skips} == {79, 80}, "nobody knows better"


def test_one_device_alone_gives_up_on_what_is_not_finite_and_lives_with_a_jump() -> None:
    run = Run(lambda step, leaf, device: math.nan if (step, leaf) == (80, 2) else 0.0, devices=1)
    run.train(200)
    assert what(run)[-1] == (80, "give up", "unknown")
    assert len(run.skips) == 0
    assert "nothing tells the data from the device" in run.log[-1][1].why
    jump = Run(lambda step, leaf, device: 9.0 if (step, leaf) == (80, 2) else 0.0, devices=1)
    jump.train(200)
    assert what(jump)[-1] == (80, "go on", "unknown")


def test_what_no_skip_mends_is_given_up() -> None:
    """The state itself is bad: nothing that is left out makes it better."""
    for by_leaf in (True, False):
        run = Run(lambda step, leaf, device: math.nan if step >= 80 else 0.0, by_leaf=by_leaf)
        run.skips = Never()
        run.train(200)
        assert run.log[-1][1].do is Do.GIVE_UP


class Never(Skips):
    """Skipping does not help."""

    def reason(self, step: int, microbatch: int) -> str:
        return ""

    def with_more(self, skips: object) -> Skips:
        return self


def test_a_loss_that_falls_or_drifts_is_no_jump() -> None:
    run = Run(lambda step, leaf, device: 0.002 * step)
    run.train(1000)
    assert run.log == []


def test_transitions_are_those_of_the_table() -> None:
    for before in Mood:
        for after in Mood:
            if after in TRANSITIONS[before]:
                assert advance(before, after) is after
            else:
                with pytest.raises(ValueError, match="there is no way"):
                    advance(before, after)


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

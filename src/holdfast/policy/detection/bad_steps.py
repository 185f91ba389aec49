"""Decides what to do about a step that is not finite, or whose loss jumps. Pure.

    calm --bad step--> again --bad again, and clear--> skipping --passed--> calm
     ^                  | ^                               |
     |                  | '------- bad again -------------'
     '---- it passed ---'

Nothing of a bad step was applied, so it is repeated from the state before it. The first time, the
suspects (microbatches that may have caused it) are dealt to other devices. The result is evidence
for `policy/detection/blame.py`. Data that is bad wherever it is computed is skipped with its
reason. If a microbatch is bad on one device alone, that device is named, and left out if this
repeats.

A fault that no skip can mend ends the run. Examples are bad steps in a row, or steps of unknown
cause. Another is a step with most microbatches bad at once: the learning rate or the state is at
fault. A jump is accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from holdfast.core.data.skips import Skip, Skips
from holdfast.policy.detection.blame import BlameVerdict, Culprit, Trial, assign_blame

DeviceName = str
"""The computer of a microbatch: the processes of a replica, in the words of messages."""


class BadStepPhase(StrEnum):
    NORMAL = "calm"
    RETRYING = "again"  # a bad step is done again, its suspects elsewhere
    SKIPPING = "skipping"  # it is done again without what is to blame


BAD_STEP_TRANSITIONS: dict[BadStepPhase, frozenset[BadStepPhase]] = {
    BadStepPhase.NORMAL: frozenset({BadStepPhase.RETRYING}),
    BadStepPhase.RETRYING: frozenset(
        {BadStepPhase.NORMAL, BadStepPhase.RETRYING, BadStepPhase.SKIPPING}
    ),
    BadStepPhase.SKIPPING: frozenset(
        {BadStepPhase.NORMAL, BadStepPhase.RETRYING, BadStepPhase.SKIPPING}
    ),
}


def advance(phase: BadStepPhase, to: BadStepPhase) -> BadStepPhase:
    """The new mood. Raises ValueError for a transition that is not in the table."""
    if to not in BAD_STEP_TRANSITIONS[phase]:
        raise ValueError(f"from {phase} there is no way to {to}")
    return to


@dataclass(frozen=True)
class BadStepLimits:
    """Limits of the repetitions.

    Attributes:
        max_unclear_failures: Repetitions of a step of unknown cause.
        max_failures: Repetitions of any step.
        max_skips: Microbatches that a run leaves out at most.
        max_consecutive_skip_steps: Steps in a row of which it does.
        max_device_errors: A device that was to blame this often is left out.
    """

    max_unclear_failures: int = 1
    max_failures: int = 6
    max_skips: int = 16
    max_consecutive_skip_steps: int = 2
    max_device_errors: int = 3


@dataclass(frozen=True)
class BadStep:
    """A step that was not applied.

    Attributes:
        description: A phrase ("is not finite").
        device_of: The device that computed each of its microbatches.
        suspects: Microbatches that may have caused it.
        is_reproduced: The same devices computed these once more at once, and they were bad again;
        None:
            they
            did not.
        can_be_accepted: It may be applied anyway.
    """

    step: int
    description: str
    device_of: Mapping[int, DeviceName]
    suspects: frozenset[int]
    is_reproduced: bool | None = None
    can_be_accepted: bool = False


class BadStepAction(StrEnum):
    RETRY = "again"  # with `avoid`
    SKIP = "skip"
    ACCEPT = "accept"  # the same again, and applied whatever it is
    GIVE_UP = "give up"


@dataclass(frozen=True)
class Finding:
    """The cause of something bad in a step, if known."""

    step: int
    blame: Culprit
    microbatches: tuple[int, ...]
    devices: tuple[DeviceName, ...]
    why: str


@dataclass(frozen=True)
class BadStepDecision:
    """avoided_devices: the device that is not to compute a microbatch. finding: what has become
    clear; finding_if_passed: what will have, when the step is good this time. excluded_devices:
    devices that are not to be used any more."""

    action: BadStepAction
    step: int
    reason: str
    avoided_devices: Mapping[int, DeviceName] = field(default_factory=dict)
    skips: tuple[Skip, ...] = ()
    finding: Finding | None = None
    finding_if_passed: Finding | None = None
    excluded_devices: tuple[DeviceName, ...] = ()


class BadStepPolicy:
    """Takes every bad step, and the run's progress since. skips: all that is left out."""

    def __init__(self, skips: Skips | None = None, limits: BadStepLimits | None = None) -> None:
        self.skips = skips or Skips()
        self.phase = BadStepPhase.NORMAL
        self._limits = limits or BadStepLimits()
        self._trials: dict[int, list[Trial]] = {}  # by microbatch of the step
        # the newest, as long as its step has not passed
        self._decision: BadStepDecision | None = None
        self._failures = self._unclear_failures = 0
        self._errors: Counter[DeviceName] = Counter()

    @property
    def pending_decision(self) -> BadStepDecision | None:
        """The state of a bad step until it has passed."""
        return self._decision

    def step_passed(self, step: int) -> None:
        """The run's state is that after `step`."""
        if self._decision is None or step < self._decision.step:
            return
        found = self._decision.finding_if_passed
        if found is not None and found.blame is Culprit.DEVICE:
            self._errors.update(found.devices)
        self.phase = advance(self.phase, BadStepPhase.NORMAL)
        self._trials, self._decision = {}, None
        self._failures = self._unclear_failures = 0

    def step_failed(self, bad_step: BadStep) -> BadStepDecision:
        if self._decision is not None and bad_step.step != self._decision.step:
            self.step_passed(self._decision.step)  # without that, no later step would have come
        self._failures += 1
        for leaf, device in bad_step.device_of.items():
            tried = self._trials.setdefault(leaf, [])
            tried.append(Trial(device, leaf in bad_step.suspects))
            if leaf in bad_step.suspects and bad_step.is_reproduced is not None:
                tried.append(Trial(device, bad_step.is_reproduced))
        self._decision = decision = (
            self._decide_first_failure(bad_step)
            if self._failures == 1
            else self._decide_repeated_failure(bad_step)
        )
        self.phase = advance(
            self.phase, BadStepPhase.SKIPPING if decision.skips else BadStepPhase.RETRYING
        )
        return decision

    # --- what is done ---------------------------------------------------------------------------
    def _decide_first_failure(self, bad_step: BadStep) -> BadStepDecision:
        if self._are_previous_steps_skipped(bad_step.step):
            why = f"step {bad_step.step} {bad_step.description}"
            return self._accept_or_give_up(
                bad_step, f"{why}, and so was what was left out of the steps before"
            )
        return self._retry(
            bad_step, f"step {bad_step.step} {bad_step.description}: it is done again"
        )

    def _decide_repeated_failure(self, bad_step: BadStep) -> BadStepDecision:
        only = len(set(bad_step.device_of.values())) == 1
        found = {
            leaf: assign_blame(tried, only_device=only)
            for leaf, tried in sorted(self._trials.items())
            if any(trial.is_bad for trial in tried) and not self.skips.reason(bad_step.step, leaf)
        }
        if guilty := {at: each for at, each in found.items() if each.blame is Culprit.DATA}:
            return self._skip(bad_step, guilty)
        devices = {str(each.device) for each in found.values() if each.blame is Culprit.DEVICE}
        self._unclear_failures += len(devices) != 1
        if (
            self._unclear_failures > self._limits.max_unclear_failures
            or self._failures > self._limits.max_failures
        ):
            return self._accept_or_give_up(
                bad_step,
                f"step {bad_step.step} {bad_step.description}, {self._failures} times: nothing "
                f"tells "
                "the data from the device",
            )
        again = self._retry(
            bad_step, f"step {bad_step.step} {bad_step.description} once more: it is done again"
        )
        if len(devices) != 1:
            return again
        (device,) = devices
        self._errors[device] = max(self._errors[device], self._limits.max_device_errors)
        why = (
            f"step {bad_step.step} {bad_step.description} with whatever {device} computes; "
            f"elsewhere it is good"
        )
        who = Finding(
            bad_step.step, Culprit.DEVICE, tuple(sorted(bad_step.suspects)), (device,), why
        )
        return BadStepDecision(
            BadStepAction.RETRY,
            bad_step.step,
            again.reason,
            again.avoided_devices,
            finding=who,
            excluded_devices=self._faulty_devices(),
        )

    def _retry(self, bad_step: BadStep, why: str) -> BadStepDecision:
        """Have the bad part computed on another device, if possible."""
        seen = {
            leaf: next(str(trial.device) for trial in tried if trial.is_bad)
            for leaf, tried in sorted(self._trials.items())
            if any(trial.is_bad for trial in tried)
        }
        devices = tuple(dict.fromkeys(seen.values()))
        if len(devices) == 1:
            step = f"step {bad_step.step} {bad_step.description}"
            said = f"{step} when {devices[0]} computed it, and is well now"
            passed = Finding(bad_step.step, Culprit.DEVICE, tuple(seen), devices, said)
        else:
            said = (
                f"step {bad_step.step} {bad_step.description}, and is well now: nothing tells why"
            )
            passed = Finding(bad_step.step, Culprit.UNKNOWN, tuple(seen), devices, said)
        return BadStepDecision(
            BadStepAction.RETRY,
            bad_step.step,
            why,
            seen,
            finding_if_passed=passed,
            excluded_devices=self._faulty_devices(),
        )

    def _skip(self, bad_step: BadStep, guilty: Mapping[int, BlameVerdict]) -> BadStepDecision:
        """Bad wherever it was computed."""
        before = [skip for skip in self.skips if skip.step == bad_step.step]
        number = len(bad_step.device_of)
        if number > 1 and 2 * (len(before) + len(guilty)) > number:
            return self._accept_or_give_up(
                bad_step,
                f"step {bad_step.step} {bad_step.description} with most of its microbatches, "
                "wherever they are computed",
            )
        if len(self.skips) + len(guilty) > self._limits.max_skips:
            return self._accept_or_give_up(
                bad_step,
                f"step {bad_step.step} {bad_step.description}, after {len(self.skips)} "
                "microbatches were left out",
            )
        what = f"step {bad_step.step} {bad_step.description}"
        skip = tuple(
            Skip(bad_step.step, at, f"{what}: {each.reason}") for at, each in guilty.items()
        )
        self.skips = self.skips.with_skips(skip)
        for leaf in guilty:
            del self._trials[leaf]
        devices = tuple(dict.fromkeys(str(each.device) for each in guilty.values()))
        leaves = ", ".join(str(at) for at in guilty)
        why = f"{what} wherever microbatch {leaves} is computed: it is left out"
        found = Finding(bad_step.step, Culprit.DATA, tuple(guilty), devices, why)
        return BadStepDecision(BadStepAction.SKIP, bad_step.step, why, skips=skip, finding=found)

    def _accept_or_give_up(self, bad_step: BadStep, why: str) -> BadStepDecision:
        """A jump can be lived with; what is not finite cannot."""
        leaves = tuple(sorted(bad_step.suspects))
        found = Finding(bad_step.step, Culprit.UNKNOWN, leaves, (), why)
        return BadStepDecision(
            BadStepAction.ACCEPT if bad_step.can_be_accepted else BadStepAction.GIVE_UP,
            bad_step.step,
            why,
            finding=found,
        )

    def _are_previous_steps_skipped(self, step: int) -> bool:
        """Return True if something was left out of each of the steps just before."""
        steps = {skip.step for skip in self.skips}
        return all(
            step - back in steps for back in range(1, self._limits.max_consecutive_skip_steps + 1)
        )

    def _faulty_devices(self) -> tuple[DeviceName, ...]:
        return tuple(
            d for d, count in self._errors.items() if count >= self._limits.max_device_errors
        )


@dataclass(frozen=True)
class StepRetry:
    """The ranks' notice of a bad step that their generation must repeat.

    Attributes:
        avoid: By microbatch, the replicas that must not compute it.
        accept: It is applied whatever it is.
        if_passed: Written to the journal once the step has passed.
    """

    step: int
    avoid: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    accept: bool = False
    if_passed: Finding | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "avoid": [[leaf, list(at)] for leaf, at in self.avoid.items()],
            "accept": self.accept,
            "if_passed": None if self.if_passed is None else asdict(self.if_passed),
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> StepRetry:
        """Raises KeyError, TypeError and ValueError for what is none."""
        told = value.get("if_passed")
        return StepRetry(
            int(value["step"]),
            {int(leaf): tuple(int(r) for r in at) for leaf, at in value["avoid"]},
            bool(value["accept"]),
            None
            if told is None
            else Finding(
                int(told["step"]),
                Culprit(told["blame"]),
                tuple(map(int, told["microbatches"])),
                tuple(map(str, told["devices"])),
                str(told["why"]),
            ),
        )

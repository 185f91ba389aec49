"""Decides what to do about a step that is not finite, or whose loss jumps. Pure.

Nothing of a bad step was applied, so it is repeated from the state before it. The first time, the
suspects (microbatches that may have caused it) are dealt to other devices. The result is evidence
(`assign_blame`). Data that is bad wherever it is computed is skipped with its
reason. If a microbatch is bad on one device alone, that device is named, and left out if this
repeats.

A fault that no skip can mend ends the run. Examples are bad steps in a row, or steps of unknown
cause. Another is a step with most microbatches bad at once: the learning rate or the state is at
fault. A jump is accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from holdfast.core.data.skips import Skip, Skips
from holdfast.core.json_parsing import JsonMessage


class Culprit(StrEnum):
    DATA = "data"
    DEVICE = "device"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Trial:
    """One piece of data was computed on `device`, and came out bad or good."""

    device: Hashable
    is_bad: bool


@dataclass(frozen=True)
class BlameVerdict:
    """device: the one it was seen on first. reason: a sentence."""

    blame: Culprit
    device: Hashable
    reason: str


def assign_blame(trials: Sequence[Trial], *, only_device: bool = False) -> BlameVerdict:
    """From all trials of one piece of data, in order. It was bad on some device first; from then on
    it is computed again, on other devices where there are any. A step computes the same bits
    wherever and however often it is done, so:

    | bad on          | good anywhere | to blame                                              |
    |-----------------|---------------|-------------------------------------------------------|
    | several devices | no            | the data                                              |
    | one, repeatedly | no            | the data, where there is no other device to try it on |
    | one             | yes           | the device, even if it computes the same well now     |
    | several devices | yes           | undecided                                             |

    only_device: there is no other device. Raises ValueError where none was bad.
    """
    bad = list(dict.fromkeys(trial.device for trial in trials if trial.is_bad))
    if not bad:
        raise ValueError("nothing was bad, so nothing is to blame")
    good = list(dict.fromkeys(str(trial.device) for trial in trials if not trial.is_bad))
    count = sum(trial.is_bad for trial in trials)
    times = "once" if count == 1 else f"{count} times"
    why = f"bad on {' and '.join(map(str, bad))}, {times}"
    why += f"; good on {' and '.join(good)}" if good else "; good nowhere"
    if good:
        blame = Culprit.DEVICE if len(bad) == 1 else Culprit.UNKNOWN
    else:
        told_apart = len(bad) > 1 or (only_device and len(trials) > 1)
        blame = Culprit.DATA if told_apart else Culprit.UNKNOWN
    return BlameVerdict(blame, bad[0], why)


DeviceName = str
"""The computer of a microbatch: the processes of a replica, in the words of messages."""


@dataclass(frozen=True)
class BadStepLimits:
    """Limits of the repetitions."""

    max_unclear_failures: int = 1  # repetitions of a step of unknown cause
    max_failures: int = 6  # repetitions of any step
    max_skips: int = 16  # microbatches that a run leaves out
    max_consecutive_skip_steps: int = 2  # steps in a row of which it does
    max_device_errors: int = 3  # a device that was to blame this often is left out


@dataclass(frozen=True)
class BadStep:
    """A step that was not applied. is_reproduced: the same devices computed the suspects once more
    at once, and they were bad again; None: they did not."""

    step: int
    description: str  # a phrase ("is not finite")
    device_of: Mapping[int, DeviceName]  # that computed each of its microbatches
    suspects: frozenset[int]  # microbatches that may have caused it
    is_reproduced: bool | None = None
    can_be_accepted: bool = False  # it may be applied anyway

    @property
    def what(self) -> str:
        return f"step {self.step} {self.description}"


class BadStepAction(StrEnum):
    RETRY = "again"  # with `avoid`
    SKIP = "skip"
    ACCEPT = "accept"  # the same again, and applied whatever it is
    GIVE_UP = "give up"


@dataclass(frozen=True)
class Finding(JsonMessage):
    """The cause of something bad in a step, if known."""

    step: int
    blame: Culprit
    microbatches: tuple[int, ...]
    devices: tuple[DeviceName, ...]
    why: str


@dataclass(frozen=True)
class BadStepDecision:
    """What to do about a bad step. avoided_devices: by microbatch, which is not to compute it."""

    action: BadStepAction
    step: int
    reason: str
    avoided_devices: Mapping[int, DeviceName] = field(default_factory=dict)
    skips: tuple[Skip, ...] = ()
    finding: Finding | None = None  # what has become clear
    finding_if_passed: Finding | None = None  # what will have, when the step is good this time
    excluded_devices: tuple[DeviceName, ...] = ()  # not to be used any more


class BadStepPolicy:
    """Takes every bad step, and the run's progress since. skips: all that is left out."""

    def __init__(self, skips: Skips | None = None, limits: BadStepLimits | None = None) -> None:
        self.skips = skips or Skips()
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
        first = self._failures == 1
        self._decision = (self._decide_first if first else self._decide_repeated)(bad_step)
        return self._decision

    # --- what is done ---------------------------------------------------------------------------
    def _decide_first(self, bad_step: BadStep) -> BadStepDecision:
        skipped, steps = {skip.step for skip in self.skips}, self._limits.max_consecutive_skip_steps
        if skipped.issuperset(range(bad_step.step - steps, bad_step.step)):
            why = f"{bad_step.what}, and so was what was left out of the steps before"
            return self._accept_or_give_up(bad_step, why)
        return self._retry(bad_step, f"{bad_step.what}: it is done again")

    def _decide_repeated(self, bad_step: BadStep) -> BadStepDecision:
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
            why = f"{bad_step.what}, {self._failures} times: nothing tells the data from the device"
            return self._accept_or_give_up(bad_step, why)
        again = self._retry(bad_step, f"{bad_step.what} once more: it is done again")
        if len(devices) != 1:
            return again
        (device,) = devices
        self._errors[device] = max(self._errors[device], self._limits.max_device_errors)
        why = f"{bad_step.what} with whatever {device} computes; elsewhere it is good"
        leaves = tuple(sorted(bad_step.suspects))
        return replace(
            again,
            finding=Finding(bad_step.step, Culprit.DEVICE, leaves, (device,), why),
            finding_if_passed=None,
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
            said = f"{bad_step.what} when {devices[0]} computed it, and is well now"
            passed = Finding(bad_step.step, Culprit.DEVICE, tuple(seen), devices, said)
        else:
            said = f"{bad_step.what}, and is well now: nothing tells why"
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
            why = f"{bad_step.what} with most of its microbatches, wherever they are computed"
            return self._accept_or_give_up(bad_step, why)
        if len(self.skips) + len(guilty) > self._limits.max_skips:
            why = f"{bad_step.what}, after {len(self.skips)} microbatches were left out"
            return self._accept_or_give_up(bad_step, why)
        what = bad_step.what
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

    def _faulty_devices(self) -> tuple[DeviceName, ...]:
        return tuple(
            d for d, count in self._errors.items() if count >= self._limits.max_device_errors
        )


@dataclass(frozen=True)
class StepRetry:
    """The ranks' notice of a bad step that their generation must repeat."""

    step: int
    avoid: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # replicas, by microbatch
    accept: bool = False  # it is applied whatever it is
    if_passed: Finding | None = None  # written to the journal once the step has passed

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

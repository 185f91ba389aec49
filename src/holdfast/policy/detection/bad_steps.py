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
from holdfast.policy.detection.blame import Blame, Trial, Verdict, verdict

Device = str
"""The computer of a microbatch: the processes of a replica, in the words of messages."""


class Mood(StrEnum):
    CALM = "calm"
    AGAIN = "again"  # a bad step is done again, its suspects elsewhere
    SKIPPING = "skipping"  # it is done again without what is to blame


TRANSITIONS: dict[Mood, frozenset[Mood]] = {
    Mood.CALM: frozenset({Mood.AGAIN}),
    Mood.AGAIN: frozenset({Mood.CALM, Mood.AGAIN, Mood.SKIPPING}),
    Mood.SKIPPING: frozenset({Mood.CALM, Mood.AGAIN, Mood.SKIPPING}),
}


def advance(mood: Mood, to: Mood) -> Mood:
    """The new mood. Raises ValueError for a transition that is not in the table."""
    if to not in TRANSITIONS[mood]:
        raise ValueError(f"from {mood} there is no way to {to}")
    return to


@dataclass(frozen=True)
class Bounds:
    """Limits of the repetitions.

    Attributes:
        unclear: Repetitions of a step of unknown cause.
        times: Repetitions of any step.
        skips: Microbatches that a run leaves out at most.
        row: Steps in a row of which it does.
        errors: A device that was to blame this often is left out.
    """

    unclear: int = 1
    times: int = 6
    skips: int = 16
    row: int = 2
    errors: int = 3


@dataclass(frozen=True)
class Bad:
    """A step that was not applied.

    Attributes:
        what: A phrase ("is not finite").
        where: The device that computed each of its microbatches.
        suspects: Microbatches that may have caused it.
        again: The same devices computed these once more at once, and they were bad again; None:
            they
            did not.
        bearable: It may be applied anyway.
    """

    step: int
    what: str
    where: Mapping[int, Device]
    suspects: frozenset[int]
    again: bool | None = None
    bearable: bool = False


class Do(StrEnum):
    AGAIN = "again"  # with `avoid`
    SKIP = "skip"
    ACCEPT = "accept"  # the same again, and applied whatever it is
    GIVE_UP = "give up"


@dataclass(frozen=True)
class Found:
    """The cause of something bad in a step, if known."""

    step: int
    blame: Blame
    microbatches: tuple[int, ...]
    devices: tuple[Device, ...]
    why: str


@dataclass(frozen=True)
class Decision:
    """avoid: the device that is not to compute a microbatch. found: what has become clear;
    if_passed: what will have, when the step is good this time. leave_out: devices that are not to
    be used any more."""

    do: Do
    step: int
    why: str
    avoid: Mapping[int, Device] = field(default_factory=dict)
    skip: tuple[Skip, ...] = ()
    found: Found | None = None
    if_passed: Found | None = None
    leave_out: tuple[Device, ...] = ()


class Trials:
    """Takes every bad step, and the run's progress since. skips: all that is left out."""

    def __init__(self, skips: Skips | None = None, bounds: Bounds | None = None) -> None:
        self.skips = skips or Skips()
        self.mood = Mood.CALM
        self._bounds = bounds or Bounds()
        self._trials: dict[int, list[Trial]] = {}  # by microbatch of the step
        self._decision: Decision | None = None  # the newest, as long as its step has not passed
        self._times = self._unclear = 0
        self._errors: Counter[Device] = Counter()

    @property
    def pending(self) -> Decision | None:
        """The state of a bad step until it has passed."""
        return self._decision

    def passed(self, step: int) -> None:
        """The run's state is that after `step`."""
        if self._decision is None or step < self._decision.step:
            return
        found = self._decision.if_passed
        if found is not None and found.blame is Blame.DEVICE:
            self._errors.update(found.devices)
        self.mood = advance(self.mood, Mood.CALM)
        self._trials, self._decision = {}, None
        self._times = self._unclear = 0

    def bad(self, bad: Bad) -> Decision:
        if self._decision is not None and bad.step != self._decision.step:
            self.passed(self._decision.step)  # without that, no later step would have come
        self._times += 1
        for leaf, device in bad.where.items():
            tried = self._trials.setdefault(leaf, [])
            tried.append(Trial(device, leaf in bad.suspects))
            if leaf in bad.suspects and bad.again is not None:
                tried.append(Trial(device, bad.again))
        self._decision = decision = self._first(bad) if self._times == 1 else self._next(bad)
        self.mood = advance(self.mood, Mood.SKIPPING if decision.skip else Mood.AGAIN)
        return decision

    # --- what is done ---------------------------------------------------------------------------
    def _first(self, bad: Bad) -> Decision:
        if self._row(bad.step):
            why = f"step {bad.step} {bad.what}, and so was what was left out of the steps before"
            return self._end(bad, why)
        return self._again(bad, f"step {bad.step} {bad.what}: it is done again")

    def _next(self, bad: Bad) -> Decision:
        only = len(set(bad.where.values())) == 1
        found = {
            leaf: verdict(tried, only=only)
            for leaf, tried in sorted(self._trials.items())
            if any(trial.bad for trial in tried) and not self.skips.reason(bad.step, leaf)
        }
        if guilty := {at: each for at, each in found.items() if each.blame is Blame.DATA}:
            return self._skip(bad, guilty)
        devices = {str(each.device) for each in found.values() if each.blame is Blame.DEVICE}
        self._unclear += len(devices) != 1
        if self._unclear > self._bounds.unclear or self._times > self._bounds.times:
            return self._end(bad, f"step {bad.step} {bad.what}, {self._times} times: nothing tells "
                             "the data from the device")  # fmt: skip
        again = self._again(bad, f"step {bad.step} {bad.what} once more: it is done again")
        if len(devices) != 1:
            return again
        (device,) = devices
        self._errors[device] = max(self._errors[device], self._bounds.errors)
        why = f"step {bad.step} {bad.what} with whatever {device} computes; elsewhere it is good"
        who = Found(bad.step, Blame.DEVICE, tuple(sorted(bad.suspects)), (device,), why)
        return Decision(
            Do.AGAIN, bad.step, again.why, again.avoid, found=who, leave_out=self._sick()
        )

    def _again(self, bad: Bad, why: str) -> Decision:
        """Have the bad part computed on another device, if possible."""
        seen = {
            leaf: next(str(trial.device) for trial in tried if trial.bad)
            for leaf, tried in sorted(self._trials.items())
            if any(trial.bad for trial in tried)
        }
        devices = tuple(dict.fromkeys(seen.values()))
        if len(devices) == 1:
            said = f"step {bad.step} {bad.what} when {devices[0]} computed it, and is well now"
            passed = Found(bad.step, Blame.DEVICE, tuple(seen), devices, said)
        else:
            said = f"step {bad.step} {bad.what}, and is well now: nothing tells why"
            passed = Found(bad.step, Blame.UNKNOWN, tuple(seen), devices, said)
        return Decision(
            Do.AGAIN, bad.step, why, seen, if_passed=passed, leave_out=self._sick(),
        )  # fmt: skip

    def _skip(self, bad: Bad, guilty: Mapping[int, Verdict]) -> Decision:
        """Bad wherever it was computed."""
        before = [skip for skip in self.skips if skip.step == bad.step]
        number = len(bad.where)
        if number > 1 and 2 * (len(before) + len(guilty)) > number:
            return self._end(bad, f"step {bad.step} {bad.what} with most of its microbatches, "
                             "wherever they are computed")  # fmt: skip
        if len(self.skips) + len(guilty) > self._bounds.skips:
            return self._end(bad, f"step {bad.step} {bad.what}, after {len(self.skips)} "
                             "microbatches were left out")  # fmt: skip
        what = f"step {bad.step} {bad.what}"
        skip = tuple(Skip(bad.step, at, f"{what}: {each.why}") for at, each in guilty.items())
        self.skips = self.skips.with_more(skip)
        for leaf in guilty:
            del self._trials[leaf]
        devices = tuple(dict.fromkeys(str(each.device) for each in guilty.values()))
        leaves = ", ".join(str(at) for at in guilty)
        why = f"{what} wherever microbatch {leaves} is computed: it is left out"
        found = Found(bad.step, Blame.DATA, tuple(guilty), devices, why)
        return Decision(Do.SKIP, bad.step, why, skip=skip, found=found)

    def _end(self, bad: Bad, why: str) -> Decision:
        """A jump can be lived with; what is not finite cannot."""
        leaves = tuple(sorted(bad.suspects))
        found = Found(bad.step, Blame.UNKNOWN, leaves, (), why)
        return Decision(Do.ACCEPT if bad.bearable else Do.GIVE_UP, bad.step, why, found=found)

    def _row(self, step: int) -> bool:
        """Return True if something was left out of each of the steps just before."""
        steps = {skip.step for skip in self.skips}
        return all(step - back in steps for back in range(1, self._bounds.row + 1))

    def _sick(self) -> tuple[Device, ...]:
        return tuple(d for d, count in self._errors.items() if count >= self._bounds.errors)


@dataclass(frozen=True)
class Retry:
    """The ranks' notice of a bad step that their generation must repeat.

    Attributes:
        avoid: By microbatch, the replicas that must not compute it.
        accept: It is applied whatever it is.
        if_passed: Written to the journal once the step has passed.
    """

    step: int
    avoid: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    accept: bool = False
    if_passed: Found | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step, "avoid": [[leaf, list(at)] for leaf, at in self.avoid.items()],
            "accept": self.accept,
            "if_passed": None if self.if_passed is None else asdict(self.if_passed),
        }  # fmt: skip

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Retry:
        """Raises KeyError, TypeError and ValueError for what is none."""
        told = value.get("if_passed")
        return Retry(
            int(value["step"]),
            {int(leaf): tuple(int(r) for r in at) for leaf, at in value["avoid"]},
            bool(value["accept"]),
            None if told is None else Found(
                int(told["step"]), Blame(told["blame"]), tuple(map(int, told["microbatches"])),
                tuple(map(str, told["devices"])), str(told["why"]),
            ),
        )  # fmt: skip

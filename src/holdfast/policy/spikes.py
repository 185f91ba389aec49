"""What is done about a loss that jumps, or a step that is not finite. Pure.

    calm --bad step--> again --bad again, elsewhere too--> skipping --passed--> calm
     ^                  |                                     |
     '---- it passed ---'   <------------ bad again ----------'

A bad step is done again from a state before it, and its suspects, the microbatches that may have
caused it, are computed on other devices. What comes of it is evidence for `policy/blame.py`: data
that is bad on two devices is skipped, with its reason; a device on which alone it was bad is named.

Suspects. Not finite: nothing of the step was applied, so it is done again from the state before
it; what the device computed that saw it first is suspect. A jump: if some microbatches of the step
stand out, they are suspect, and the state before the step is good. If all have jumped, the update
before has spoilt the state: that step is done again, and all of it is suspect. Where losses of
microbatches are not known, both steps are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import isfinite
from statistics import median

from holdfast.policy.blame import Blame, Trial, Verdict, verdict
from holdfast.spec.skips import Skip

Piece = tuple[int, int]
"""(step, microbatch)"""


class Mood(StrEnum):
    CALM = "calm"
    AGAIN = "again"  # a bad step is done again, its suspects elsewhere
    SKIPPING = "skipping"  # it is done again without what is to blame


TRANSITIONS: dict[Mood, frozenset[Mood]] = {
    Mood.CALM: frozenset({Mood.AGAIN}),
    Mood.AGAIN: frozenset({Mood.CALM, Mood.AGAIN, Mood.SKIPPING}),
    Mood.SKIPPING: frozenset({Mood.CALM, Mood.AGAIN}),
}


def advance(mood: Mood, to: Mood) -> Mood:
    """The new mood. Raises ValueError for a transition that is not in the table."""
    if to not in TRANSITIONS[mood]:
        raise ValueError(f"from {mood} there is no way to {to}")
    return to


@dataclass(frozen=True)
class Limits:
    """A loss has jumped when it is `times` scatters (1.48 median absolute deviations) and `rise`
    nats above the line through the last `window` steps, of which there are `least` at least. tries:
    how often a step is done again before it is given up, where nothing can be told apart."""

    window: int = 64
    least: int = 20
    times: float = 8.0
    rise: float = 0.3
    tries: int = 2


@dataclass(frozen=True)
class Seen:
    """What is known of a step after its vote. loss: mean per token. devices: where each
    microbatch was computed. losses: mean per token of each microbatch, where they are known.
    device: where something was not finite first."""

    step: int
    loss: float
    devices: Mapping[int, Hashable]
    losses: Mapping[int, float] = field(default_factory=dict)
    device: Hashable | None = None


class Do(StrEnum):
    GO_ON = "go on"
    ROLL_BACK = "roll back"
    GIVE_UP = "give up"  # the same again, and nothing can be told apart


@dataclass(frozen=True)
class Decision:
    """to: the step whose state is taken. elsewhere: microbatches that are to be computed on another
    device than named. skip: more of what is skipped from now on. blame, device: what has become
    clear. why: a sentence, empty where nothing has happened."""

    do: Do = Do.GO_ON
    to: int = 0
    elsewhere: Mapping[Piece, Hashable] = field(default_factory=dict)
    skip: tuple[Skip, ...] = ()
    blame: Blame | None = None
    device: Hashable | None = None
    why: str = ""


class Spikes:
    """Is shown every step after its vote, and says how to go on. All who are shown the same come
    to the same decisions."""

    def __init__(self, limits: Limits | None = None):
        self.limits = limits or Limits()
        self.mood = Mood.CALM
        self._losses: deque[tuple[int, float]] = deque(maxlen=self.limits.window)
        self._trials: dict[Piece, list[Trial]] = {}
        self._to, self._until, self._tries = 0, 0, 0
        self._rounds = 0  # how often something was skipped in vain
        self._devices: dict[int, Mapping[int, Hashable]] = {}  # of the newest steps

    def observe(self, seen: Seen) -> Decision:
        self._devices[seen.step] = dict(seen.devices)
        for old in [step for step in self._devices if step < seen.step - 1]:
            del self._devices[old]
        suspects = self._suspects(seen)
        if suspects is None:
            self._losses.append((seen.step, seen.loss))
            if self.mood is not Mood.CALM and seen.step >= self._until:
                return self._passed()
            return Decision()
        to, pieces = suspects
        if self.mood is Mood.AGAIN:
            return self._again(seen, to, pieces)
        self._rounds = self._rounds + 1 if self.mood is Mood.SKIPPING else 0
        if self._rounds >= self.limits.tries:
            return self._give_up(seen, f"{self._what(seen)}, with what was skipped,")
        return self._first(seen, to, pieces)

    # --- what is bad ------------------------------------------------------------------------
    def _suspects(self, seen: Seen) -> tuple[int, list[Piece]] | None:
        """(step to go back to, what may have caused it); None where nothing is wrong."""
        here = [(seen.step, leaf) for leaf in sorted(seen.devices)]
        if not isfinite(seen.loss) or seen.device is not None:
            bad = [leaf for leaf, loss in seen.losses.items() if not isfinite(loss)]
            on = [p for p in here if p[1] in bad or (not bad and self._is_on(seen, p[1]))]
            return seen.step - 1, on or here
        limit = self._limit()
        if limit is None or seen.loss <= limit:
            return None
        high = [leaf for leaf, loss in sorted(seen.losses.items()) if loss > limit]
        before = seen.step - 1
        if seen.losses and (2 * len(high) <= len(seen.losses) or before not in self._devices):
            return before, [(seen.step, leaf) for leaf in high] or here
        if before not in self._devices:
            return before, here
        earlier = [(before, leaf) for leaf in sorted(self._devices[before])]
        return before - 1, earlier if seen.losses else earlier + here

    def _is_on(self, seen: Seen, leaf: int) -> bool:
        return seen.device is not None and seen.devices[leaf] == seen.device

    def _limit(self) -> float | None:
        """The loss above which one has jumped."""
        losses = [loss for _, loss in self._losses]
        if len(losses) < self.limits.least:
            return None
        # A falling loss is no scatter: what remains beside a line through the two halves counts.
        half = len(losses) // 2
        slope = median((b - a) / half for a, b in zip(losses, losses[half:], strict=False))
        level = [loss + slope * (len(losses) - at) for at, loss in enumerate(losses)]
        middle = median(level)
        scatter = 1.4826 * median(abs(loss - middle) for loss in level)
        return middle + max(self.limits.times * scatter, self.limits.rise)

    # --- what is done -----------------------------------------------------------------------
    def _first(self, seen: Seen, to: int, pieces: Sequence[Piece]) -> Decision:
        self.mood = advance(self.mood, Mood.AGAIN)
        self._to, self._until, self._tries = to, seen.step, 1
        self._trials = {piece: [Trial(self._device_of(piece), True)] for piece in pieces}
        return self._roll_back(f"{self._what(seen)}: once more from step {to}, on other devices")

    def _again(self, seen: Seen, to: int, pieces: Sequence[Piece]) -> Decision:
        """It is bad once more, perhaps with other suspects."""
        for piece, trials in self._trials.items():
            trials.append(Trial(self._device_of(piece), piece in pieces))
        for piece in pieces:
            self._trials.setdefault(piece, [Trial(self._device_of(piece), True)])
        self._to, self._tries = min(self._to, to), self._tries + 1
        found = {piece: verdict(trials) for piece, trials in sorted(self._trials.items())}
        what = self._what(seen)
        guilty = {at: each for at, each in found.items() if each.blame is Blame.DATA}
        if guilty:
            return self._skip(what, guilty)
        if self._tries > self.limits.tries:
            return self._give_up(seen, what)
        self.mood = advance(self.mood, Mood.AGAIN)
        devices = {each.device for each in found.values() if each.blame is Blame.DEVICE}
        decision = self._roll_back(f"{what} again: once more from step {self._to}")
        if len(devices) != 1:
            return decision
        device = devices.pop()
        why = f"{what}, whatever {device} computes; the same is good on others"
        return replace(decision, blame=Blame.DEVICE, device=device, why=why)

    def _skip(self, what: str, guilty: Mapping[Piece, Verdict]) -> Decision:
        self.mood = advance(self.mood, Mood.SKIPPING)
        skip = tuple(Skip(*piece, f"{what}: {each.why}") for piece, each in guilty.items())
        self._trials = {}
        self._forget_losses()
        why = f"{what} on several devices: {len(skip)} microbatches are skipped"
        return Decision(Do.ROLL_BACK, self._to, skip=skip, blame=Blame.DATA, why=why)

    def _give_up(self, seen: Seen, what: str) -> Decision:
        """A jump can be lived with; what is not finite cannot."""
        self.mood = advance(self.mood, Mood.CALM)
        self._trials = {}
        why = f"{what} {self._tries} times, and nothing tells the data from the device"
        if isfinite(seen.loss) and seen.device is None:
            self._losses.append((seen.step, seen.loss))
            return Decision(blame=Blame.UNKNOWN, why=why)
        return Decision(Do.GIVE_UP, blame=Blame.UNKNOWN, why=why)

    def _passed(self) -> Decision:
        """The step that was bad is good now."""
        was, self.mood = self.mood, advance(self.mood, Mood.CALM)
        if was is Mood.SKIPPING:
            return Decision(why=f"step {self._until} is good without what was skipped")
        found = []
        for piece, trials in self._trials.items():
            trials.append(Trial(self._device_of(piece), False))
            found.append(verdict(trials))
        self._trials = {}
        devices = {each.device for each in found if each.blame is Blame.DEVICE}
        if len(devices) == 1:
            why = f"step {self._until} is good on other devices: {next(iter(found)).why}"
            return Decision(blame=Blame.DEVICE, device=devices.pop(), why=why)
        why = f"step {self._until} is good now, and nothing tells why"
        return Decision(blame=Blame.UNKNOWN, why=why)

    def _roll_back(self, why: str) -> Decision:
        self._forget_losses()
        elsewhere = {piece: trials[0].device for piece, trials in self._trials.items()}
        return Decision(Do.ROLL_BACK, self._to, elsewhere, why=why)

    def _forget_losses(self) -> None:
        while self._losses and self._losses[-1][0] > self._to:
            self._losses.pop()

    def _device_of(self, piece: Piece) -> Hashable:
        step, leaf = piece
        return self._devices.get(step, {}).get(leaf)

    def _what(self, seen: Seen) -> str:
        if isfinite(seen.loss) and seen.device is None:
            return f"step {seen.step} has a loss of {seen.loss:.4g}"
        return f"step {seen.step} is not finite"

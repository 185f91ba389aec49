"""Whose fault it was: the data's or the device's. Pure.

Evidence is what became of one piece of data (a microbatch of a step) wherever it was computed. It
was bad on some device first; from then on it is computed again, on other devices where there are
any. Data is the same on every device, and a device that computes wrongly does so with other data
as well: so what is bad in two places is the data's, and what is bad in one place only is the
device's. Nothing is said where nothing can be told apart.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Blame(StrEnum):
    DATA = "data"
    DEVICE = "device"
    UNKNOWN = "unknown"


class Tried(StrEnum):
    """What several trials came to."""

    NOT = "not tried"
    GOOD = "good"
    BAD = "bad"
    MIXED = "now good, now bad"


TABLE: dict[tuple[Tried, Tried], Blame] = {
    # (on other devices, on the first one again)
    (Tried.BAD, Tried.NOT): Blame.DATA,
    (Tried.BAD, Tried.BAD): Blame.DATA,
    (Tried.BAD, Tried.GOOD): Blame.UNKNOWN,
    (Tried.BAD, Tried.MIXED): Blame.UNKNOWN,
    (Tried.GOOD, Tried.NOT): Blame.DEVICE,
    (Tried.GOOD, Tried.BAD): Blame.DEVICE,
    (Tried.GOOD, Tried.GOOD): Blame.UNKNOWN,  # it has passed, wherever it came from
    (Tried.GOOD, Tried.MIXED): Blame.DEVICE,
    (Tried.NOT, Tried.NOT): Blame.UNKNOWN,
    (Tried.NOT, Tried.BAD): Blame.UNKNOWN,  # there is no other device
    (Tried.NOT, Tried.GOOD): Blame.UNKNOWN,
    (Tried.NOT, Tried.MIXED): Blame.UNKNOWN,
    (Tried.MIXED, Tried.NOT): Blame.UNKNOWN,
    (Tried.MIXED, Tried.BAD): Blame.UNKNOWN,
    (Tried.MIXED, Tried.GOOD): Blame.UNKNOWN,
    (Tried.MIXED, Tried.MIXED): Blame.UNKNOWN,
}


@dataclass(frozen=True)
class Trial:
    """One piece of data was computed on `device`, and came out bad or good."""

    device: Hashable
    bad: bool


@dataclass(frozen=True)
class Verdict:
    """device: the one it was seen on first. why: a sentence."""

    blame: Blame
    device: Hashable
    why: str


def verdict(trials: Sequence[Trial]) -> Verdict:
    """From all trials of one piece of data, in order. Raises ValueError where none was bad."""
    first = next((i for i, trial in enumerate(trials) if trial.bad), None)
    if first is None:
        raise ValueError("nothing was bad, so nothing is to blame")
    device = trials[first].device
    elsewhere = [t for t in trials if t.device != device]
    again = [t for t in trials[first + 1 :] if t.device == device]
    others, here = _tried(elsewhere), _tried(again)
    blame = TABLE[others, here]
    places = len({t.device for t in elsewhere})
    why = f"bad on {device}; on {places} other device{'s' if places != 1 else ''} {others}"
    return Verdict(blame, device, f"{why}; on the same again {here}")


def _tried(trials: Sequence[Trial]) -> Tried:
    results = {trial.bad for trial in trials}
    if not results:
        return Tried.NOT
    if len(results) > 1:
        return Tried.MIXED
    return Tried.BAD if True in results else Tried.GOOD

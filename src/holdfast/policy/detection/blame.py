"""Decides whether the data or a device caused a bad result. Pure.

Evidence is what became of one piece of data (a microbatch of a step) wherever it was computed. It
was bad on some device first; from then on it is computed again, on other devices where there are
any. A step computes the same bits wherever and however often it is done, so:

| bad on          | good anywhere | to blame                                                  |
|-----------------|---------------|-----------------------------------------------------------|
| several devices | no            | the data                                                  |
| one, repeatedly | no            | the data, where there is no other device to try it on     |
| one             | yes           | the device, even if it computes the same well now         |
| several devices | yes           | undecided                                                 |
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum


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
    """From all trials of one piece of data, in order. only_device: there is no other device. Raises
    ValueError where none was bad."""
    bad = list(dict.fromkeys(trial.device for trial in trials if trial.is_bad))
    if not bad:
        raise ValueError("nothing was bad, so nothing is to blame")
    good = list(dict.fromkeys(str(trial.device) for trial in trials if not trial.is_bad))
    why = f"bad on {' and '.join(map(str, bad))}, {_count_phrase(trials)}"
    why += f"; good on {' and '.join(good)}" if good else "; good nowhere"
    if good:
        blame = Culprit.DEVICE if len(bad) == 1 else Culprit.UNKNOWN
    else:
        told_apart = len(bad) > 1 or (only_device and len(trials) > 1)
        blame = Culprit.DATA if told_apart else Culprit.UNKNOWN
    return BlameVerdict(blame, bad[0], why)


def _count_phrase(trials: Sequence[Trial]) -> str:
    count = sum(trial.is_bad for trial in trials)
    return "once" if count == 1 else f"{count} times"

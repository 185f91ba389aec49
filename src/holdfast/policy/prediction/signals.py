"""What a node reads of itself, and the chance that it is lost soon. Pure.

A signal is a rule, not a fit: the traces of losses that the fits are made from have no such
readings. So its chance is an assumption. The record of the run's alarms scales it (`response.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

DEFAULT_HORIZON_S = 600.0
"""Seconds that the chance of a signal is for, if the run has no fitted predictor."""
CHANCES: Mapping[str, float] = {"memory_errors": 0.8, "temperature": 0.2, "power": 0.2}
"""By signal: the chance that the node is lost within the horizon."""
REASONS: Mapping[str, str] = {
    "memory_errors": "its memory has new uncorrected errors",
    "temperature": "a device slows down because it is hot",
    "power": "the machine asks a device for less power",
}


@dataclass(frozen=True)
class SignalReading:
    """One reading. None: this machine cannot read it."""

    memory_errors: float | None = None  # uncorrected errors of all memory, counted so far
    temperature: bool | None = None  # a device slows down because of heat
    power: bool | None = None  # a power brake is on

    def missing(self, names: Sequence[str]) -> list[str]:
        """Those of the signals that this machine cannot read."""
        return [name for name in names if getattr(self, name) is None]


class SignalVerdict(NamedTuple):
    """chance: 0 to 1; 0 without any signal. reason: for the user, "" without any signal."""

    chance: float
    reason: str


@dataclass(frozen=True)
class SignalRules:
    """The signals that a run watches, and the newest reading. `update` returns the next value."""

    names: tuple[str, ...]
    base: float | None = None  # uncorrected errors that led to no alarm, or to one before
    newest: SignalReading = SignalReading()

    def update(self, reading: SignalReading) -> SignalRules:
        """Take in a reading. The first count of errors is the base: those were there before."""
        base, now = self.base, reading.memory_errors
        if base is None or (now is not None and now < base):  # a driver that was loaded again
            base = now
        return replace(self, base=base, newest=reading)

    def after_alarm(self) -> SignalRules:
        """The errors so far have led to an alarm; further ones lead to the next."""
        count = self.newest.memory_errors
        return replace(self, base=self.base if count is None else count)

    @property
    def verdict(self) -> SignalVerdict:
        errors = self.newest.memory_errors
        on = {
            "memory_errors": self.base is not None and errors is not None and errors > self.base,
            "temperature": self.newest.temperature,
            "power": self.newest.power,
        }
        active = [name for name in self.names if on[name]]
        chance = either(*(CHANCES[name] for name in active))
        return SignalVerdict(chance, " and ".join(REASONS[name] for name in active))


def either(*chances: float) -> float:
    """The chance that at least one of several independent events happens."""
    none = 1.0
    for chance in chances:
        none *= 1.0 - chance
    return 1.0 - none

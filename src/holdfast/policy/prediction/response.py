"""What a run does about a chance that nodes are lost soon: nothing, saves, or a move. Pure.

Each way has an expected price in seconds of training over the horizon h. A chance p that the node
is lost, C seconds for a save of the parts in danger, and saves every tau seconds without that:

    nothing       p (min(tau, h) / 2 + R)        the work since the last save is redone, and the
                                                 run recovers, which takes R
    save earlier  h C / s + p (s / 2 + R)        s: the best spacing, sqrt(2 C h / p) as Young's
                                                 (CACM 17(9), 1974), at most h
    move          M + p' R                       a planned handover now, which takes M; p' = 0

The chances come from a model, and a model may be wrong. So each alarm is followed to its end. The
chances are scaled by losses seen over losses claimed, with a prior that is worth `PRIOR_CLAIMS`
losses. An alarm that does not pay leads to nothing; it is still counted. So a model that stops to
be right is switched off by its own record, and on again by it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import Literal

Action = Literal["nothing", "save", "move"]

PRIOR_CLAIMS = 3.0
"""Losses that the model's own word is worth before the run has seen any."""
MAX_SCALE = 2.0
"""A record better than claimed scales chances up by so much at most."""
MIN_GAIN_SHARE = 0.1
"""Share of the price of doing nothing that an action has to save."""


@dataclass(frozen=True)
class ResponsePrices:
    """Prices in seconds of training."""

    save_s: float  # a save of the parts in danger
    save_every_s: float  # between saves without an alarm; infinite without any
    recovery_s: float  # of a loss that was not foreseen, without the work that is redone
    move_s: float = inf  # of a planned handover; infinite if no other node can take over


@dataclass(frozen=True)
class Response:
    """A decision."""

    action: Action
    every_s: float  # between saves in the horizon, for "save"
    gain_s: float  # expected seconds against doing nothing
    false_alarm_s: float  # what it costs if nothing is lost
    reason: str


@dataclass(frozen=True)
class TrackRecord:
    """The alarms that have ended. claimed: the sum of their chances. came_true: their losses."""

    alarms: int = 0
    claimed: float = 0.0
    came_true: int = 0

    def with_outcome(self, chance: float, was_lost: bool) -> TrackRecord:
        return TrackRecord(self.alarms + 1, self.claimed + chance, self.came_true + int(was_lost))

    @property
    def scale(self) -> float:
        """By what the model's chances are multiplied."""
        found = (self.came_true + PRIOR_CLAIMS) / (self.claimed + PRIOR_CLAIMS)
        return min(MAX_SCALE, found)

    @property
    def precision(self) -> float:
        return self.came_true / self.alarms if self.alarms else 0.0


@dataclass(frozen=True)
class ResponsePolicy:
    """Decides by expected seconds. threshold: a lower chance is no alarm, and is not counted."""

    horizon_s: float
    threshold: float
    record: TrackRecord = TrackRecord()

    def decide(self, chance: float, prices: ResponsePrices) -> Response:
        """The cheapest of the three for a node with this chance, by the model."""
        if chance < self.threshold or chance <= 0:
            return Response("nothing", 0.0, 0.0, 0.0, f"{chance:.0%} is below the threshold")
        p, horizon = min(1.0, chance * self.record.scale), self.horizon_s
        nothing = p * (min(prices.save_every_s, horizon) / 2 + prices.recovery_s)
        every = min(horizon, prices.save_every_s, sqrt(2 * prices.save_s * horizon / p))
        # Only saves beyond the usual ones are a price.
        more = horizon * (1 / every - 1 / prices.save_every_s) if every > 0 else 0.0
        saves = more * prices.save_s if more > 0 else 0.0
        prices_s: dict[Action, tuple[float, float]] = {
            "nothing": (nothing, 0.0),
            "save": (saves + p * (every / 2 + prices.recovery_s), saves),
            "move": (prices.move_s, prices.move_s),
        }
        action = min(prices_s, key=lambda name: prices_s[name][0])
        gain = nothing - prices_s[action][0]
        if gain < MIN_GAIN_SHARE * nothing:
            return Response("nothing", 0.0, 0.0, 0.0, self._why(p, "no action pays"))
        words = {"save": f"saves every {every:.3g} s", "move": "a planned move", "nothing": ""}
        why = self._why(p, f"{words[action]} gains {gain:.3g} s")
        return Response(action, every if action == "save" else 0.0, gain, prices_s[action][1], why)

    def with_outcome(self, chance: float, was_lost: bool) -> ResponsePolicy:
        """An alarm has ended: its node was lost within the horizon, or it was not."""
        return replace(self, record=self.record.with_outcome(chance, was_lost))

    def _why(self, p: float, decision: str) -> str:
        seen = self.record
        past = f" ({seen.came_true} of {seen.alarms} alarms came true)" if seen.alarms else ""
        return f"lost within {self.horizon_s:g} s with {p:.0%}{past}: {decision}"

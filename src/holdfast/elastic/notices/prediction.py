"""`cluster.prediction`: acts when a fitted predictor says that this node is likely to be lost.

Every agent follows which nodes take part, generation by generation, and asks the predictor for all
of them. So every agent knows how many alarms came true, also those about other nodes. It acts on
alarms about its own node only. `policy/prediction/response.py` decides whether an alarm pays, from
that record and from measured prices. An alarm is like a notice that may be false. The node's part
of the state goes to peers more often until the horizon ends. Nothing has to leave.

Pure but for the reading of the file: the caller gives the time.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import ConfigError
from holdfast.policy.prediction.history import NodeChange
from holdfast.policy.prediction.predictor import FittedModels, NodePredictor
from holdfast.policy.prediction.response import Response, ResponsePolicy, ResponsePrices

CHECKS_PER_HORIZON = 20
MAX_CHECK_INTERVAL_S = 10.0


class DueSave(NamedTuple):
    """A save that is due now. left_s: until the horizon ends. is_first: of this alarm."""

    left_s: float
    is_first: bool
    reason: str


class _Alarm(NamedTuple):
    chance: float
    until_s: float


class PredictionWatch:
    """Alarms about the nodes of a run, as one agent sees them."""

    def __init__(self, fit: FittedModels, node: str) -> None:
        self._node = node
        self._predictor = NodePredictor.of(fit)
        self.policy = ResponsePolicy(fit.horizon_s, self._predictor.threshold)
        self._alarms: dict[str, _Alarm] = {}
        self._response: Response | None = None  # to the open alarm about this node
        self._next_save_s = 0.0

    @property
    def check_interval_s(self) -> float:
        return min(MAX_CHECK_INTERVAL_S, self.policy.horizon_s / CHECKS_PER_HORIZON)

    def observe_nodes(self, nodes: Collection[str], now_s: float) -> None:
        """Take in the nodes of the generation at work; those that are missing were lost."""
        known = set(self._predictor.history.working_nodes())
        lost, joined = sorted(known - set(nodes)), sorted(set(nodes) - known)
        changes = [NodeChange(now_s, "lost", name) for name in lost]
        changes += [NodeChange(now_s, "join", name) for name in joined]
        if changes:
            self._predictor = self._predictor.update_all(changes)
        for name in lost:
            self._end_alarm(name, was_lost=True)

    def check(self, now_s: float, prices: ResponsePrices) -> DueSave | None:
        """Ask the predictor; return the save of this node's part that is due now, if any."""
        for name, alarm in list(self._alarms.items()):
            if now_s >= alarm.until_s:
                self._end_alarm(name, was_lost=False)
        horizon, is_first = self.policy.horizon_s, False
        for name in self._predictor.history.working_nodes():
            if name in self._alarms:
                continue
            chance = self._predictor.probability(name, horizon, now_s)
            if chance < self.policy.threshold or chance <= 0:
                continue
            self._alarms[name] = _Alarm(chance, now_s + horizon)
            if name == self._node:
                self._response = self.policy.decide(chance, prices)
                self._next_save_s, is_first = now_s, True
        found, mine = self._response, self._alarms.get(self._node)
        if found is None or mine is None or found.action != "save" or now_s < self._next_save_s:
            return None
        self._next_save_s = now_s + found.every_s
        return DueSave(mine.until_s - now_s, is_first, found.reason)

    def _end_alarm(self, name: str, was_lost: bool) -> None:
        alarm = self._alarms.pop(name, None)
        if alarm is None:
            return
        self.policy = self.policy.with_outcome(alarm.chance, was_lost)
        if name == self._node:
            self._response = None


def load_prediction_watch(path: str, node: str) -> PredictionWatch | None:
    """The watch that a run file asks for; None for an empty path. Raises ConfigError for a file
    that cannot be read, and DataError for one that is no fit."""
    if not path:
        return None
    try:
        text = Path(path).read_text("utf-8", "replace")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}",
            where="cluster.prediction",
            remedy="name a file that `holdfast predict fit TRACE --to FILE` wrote, "
            "or leave the key away",
        ) from None
    return PredictionWatch(FittedModels.from_text(text, path), node)

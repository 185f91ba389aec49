"""`cluster.prediction` and `cluster.signals`: acts when this node is likely to be lost.

A fitted predictor says so, or what the node reads of itself (`policy/prediction/signals.py`).

Every agent follows which nodes take part, generation by generation, and asks the predictor for all
of them. So every agent knows how many alarms came true, also those about other nodes. It acts on
alarms about its own node only. `policy/prediction/response.py` decides whether an alarm pays, from
that record and from measured prices. An alarm is like a notice that may be false:

    save    the node's part of the state goes to peers more often until the horizon ends
    move    free places elsewhere take the node's workers, after a step. The node waits as a spare
            until the horizon ends, and may take part again then

If the workers of another node move, that node's own agent alone learns whether its alarm was true.

Pure but for the reading of the file and of the signals: the caller gives the time.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from holdfast.config.sections.cluster import ClusterConfig
from holdfast.errors import ConfigError
from holdfast.machine.node_signals import read_signals
from holdfast.policy.prediction.history import NodeChange
from holdfast.policy.prediction.predictor import FittedModels, NodePredictor
from holdfast.policy.prediction.response import Response, ResponsePolicy, ResponsePrices
from holdfast.policy.prediction.signals import DEFAULT_HORIZON_S, SignalRules, either

CHECKS_PER_HORIZON = 20
MAX_CHECK_INTERVAL_S = 10.0


class DueResponse(NamedTuple):
    """A save or a move that is due now. left_s: until the horizon ends. is_first: of this alarm."""

    left_s: float
    is_first: bool
    reason: str
    is_move: bool = False


class _Alarm(NamedTuple):
    chance: float
    until_s: float
    reason: str = ""  # which signals; "" for the predictor alone


class PredictionWatch:
    """Alarms about the nodes of a run, as one agent sees them."""

    def __init__(
        self, fit: FittedModels | None, node: str, signals: SignalRules | None = None
    ) -> None:
        """fit: None without a predictor. signals: those of this node; None without any."""
        self._node, self._signals = node, signals
        self._predictor = None if fit is None else NodePredictor.of(fit)
        self._threshold = 0.0 if self._predictor is None else self._predictor.threshold
        horizon_s = DEFAULT_HORIZON_S if fit is None else fit.horizon_s
        self.policy = ResponsePolicy(horizon_s, self._threshold if signals is None else 0.0)
        self._nodes: frozenset[str] = frozenset()  # of the generation at work
        self._has_read = False  # the signals, once at least
        self._alarms: dict[str, _Alarm] = {}
        self._response: Response | None = None  # to the open alarm about this node
        self._next_save_s = 0.0
        self.has_moved = False  # this node's workers, because of the open alarm
        self.failed: list[bool] = []  # for each false alarm about this node: whether it had moved

    @property
    def check_interval_s(self) -> float:
        return min(MAX_CHECK_INTERVAL_S, self.policy.horizon_s / CHECKS_PER_HORIZON)

    def observe_nodes(
        self, nodes: Collection[str], now_s: float, present: Collection[str] = ()
    ) -> None:
        """Take in the nodes of the generation at work. Those that are missing were lost, unless
        they are among `present`: their workers have moved."""
        known, self._nodes = self._nodes, frozenset(nodes)
        gone, joined = known - set(nodes), sorted(set(nodes) - known)
        lost = sorted(gone - set(present))
        changes = [NodeChange(now_s, "lost", name) for name in lost]
        changes += [NodeChange(now_s, "left", name) for name in sorted(gone & set(present))]
        changes += [NodeChange(now_s, "join", name) for name in joined]
        if changes and self._predictor is not None:
            self._predictor = self._predictor.update_all(changes)
        for name in lost:
            self._end_alarm(name, was_lost=True)
        for name in gone - set(lost) - {self._node}:
            self._alarms.pop(name, None)

    def end_alarms(self, now_s: float) -> None:
        """End the alarms whose horizon is over: they were false."""
        for name, alarm in list(self._alarms.items()):
            if now_s >= alarm.until_s:
                self._end_alarm(name, was_lost=False)

    def check(self, now_s: float, prices: ResponsePrices) -> DueResponse | None:
        """Ask the predictor; return what is due now: a save of this node's part, or a move."""
        self.end_alarms(now_s)
        is_first = False
        for name in sorted(self._nodes):
            if name in self._alarms and not self._is_worse(name):
                continue
            if not (chance := self._chance(name, now_s)):
                continue
            self._alarms[name] = self._open_alarm(name, chance, now_s)
            if name == self._node:
                self._next_save_s, is_first = now_s, True
        mine = self._alarms.get(self._node)
        if mine is None or self.has_moved:
            return None
        found = self._response = self.policy.decide(mine.chance, prices)
        if found.action == "nothing":
            return None
        is_move = found.action == "move"
        if now_s < self._next_save_s and not is_move:
            return None
        self._next_save_s, self.has_moved = now_s + found.every_s, is_move
        reason = f"{mine.reason}; {found.reason}" if mine.reason else found.reason
        return DueResponse(mine.until_s - now_s, is_first, reason, is_move)

    def read_signals(self) -> list[str]:
        """Read this node's signals, which may take seconds. The first time, return those that this
        machine cannot read."""
        if self._signals is None:
            return []
        reading, is_first = read_signals(), not self._has_read
        self._signals, self._has_read = self._signals.update(reading), True
        return reading.missing(self._signals.names) if is_first else []

    def _chance(self, name: str, now_s: float) -> float:
        """By the predictor, from its threshold on, and of this node by its signals."""
        fitted = 0.0
        if self._predictor is not None:
            fitted = self._predictor.probability(name, self.policy.horizon_s, now_s)
        if fitted < self._threshold:
            fitted = 0.0
        if name != self._node or self._signals is None:
            return fitted
        return either(fitted, self._signals.verdict.chance)

    def _is_worse(self, name: str) -> bool:
        """Whether this node's signals say more than its open alarm does."""
        if name != self._node or self._signals is None or self.has_moved:
            return False
        return self._signals.verdict.chance > self._alarms[name].chance

    def _open_alarm(self, name: str, chance: float, now_s: float) -> _Alarm:
        reason = ""
        if name == self._node and self._signals is not None:
            reason = self._signals.verdict.reason
            self._signals = self._signals.after_alarm()
        return _Alarm(chance, now_s + self.policy.horizon_s, reason)

    def _end_alarm(self, name: str, was_lost: bool) -> None:
        alarm = self._alarms.pop(name, None)
        if alarm is None:
            return
        self.policy = self.policy.with_outcome(alarm.chance, was_lost)
        if name == self._node:
            if self._response is not None and self._response.action != "nothing":
                self.failed.append(self.has_moved)
            self._response, self.has_moved = None, False


def load_prediction_watch(cluster: ClusterConfig, node: str) -> PredictionWatch | None:
    """The watch that a run file asks for; None if it names no predictor and no signals. Raises
    ConfigError for a file that cannot be read, and DataError for one that is no fit."""
    signals = SignalRules(cluster.signals) if cluster.signals else None
    if not (path := cluster.prediction):
        return None if signals is None else PredictionWatch(None, node, signals)
    try:
        text = Path(path).read_text("utf-8", "replace")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}",
            where="cluster.prediction",
            remedy="name a file that `holdfast predict fit TRACE --to FILE` wrote, "
            "or leave the key away",
        ) from None
    return PredictionWatch(FittedModels.from_text(text, path), node, signals)

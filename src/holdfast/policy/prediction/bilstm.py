"""A bidirectional LSTM on the signals of a node over the recent past, without torch. Pure.

Graves and Schmidhuber, Neural Networks 18(5), 2005. One layer each way over a window of bins
(`windows`), the two last states, one linear layer to a logit. Training is in
`holdfast_lab.prediction.bilstm`; the agent that uses a model imports no torch, so the pass forward
is written out here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log1p
from operator import attrgetter
from typing import Any

from holdfast.policy.prediction.history import ClusterHistory, NodeRecord, ZoneRecord
from holdfast.policy.prediction.models import rescale

SIGNALS_PER_BIN = 8
"""Of each bin of a window, oldest bin first:

    0  share of the zone's nodes that were lost in the bin
    1  nodes that joined, by those that worked
    2  nodes of the zone that worked at its end, by the most that ever did
    3  1 if the node worked at its end
    4  losses of the node in it, log(1 + n)
    5  age of the node at its end, log(1 + age / bin), a tenth of it
    6  the same age by 48 bins, at most 2
    7  1 for a bin in which the zone was known at all
"""

ZoneRows = list[tuple[float, float, float, float]]
Window = list[tuple[float, ...]]


def window_of(
    history: ClusterHistory, node: str, now_s: float, bin_s: float, bins: int
) -> Window | None:
    """(bins, 8) numbers of a working node; None for another one."""
    known = history.nodes.get(node)
    if known is None or known.up_since_s is None:
        return None
    return node_window(
        known, zone_rows(history.zones[known.zone], now_s, bin_s, bins), now_s, bin_s
    )


def zone_rows(zone: ZoneRecord, now_s: float, bin_s: float, bins: int) -> ZoneRows:
    """(lost share, joined share, up share, is known) of each bin: alike for all of its nodes."""
    line, rows = zone.timeline, ZoneRows()
    times = list(map(attrgetter("t_s"), line))
    at = bisect_right(times, now_s - bins * bin_s)
    up = line[at - 1].up if at else (line[0].up - line[0].joined + line[0].lost if line else 0)
    for index in range(bins):
        end = now_s - (bins - 1 - index) * bin_s
        until = bisect_right(times, end, lo=at)
        lost = sum(instant.lost for instant in line[at:until])
        joined = sum(instant.joined for instant in line[at:until])
        before = max(1, up)
        up = line[until - 1].up if until else up
        is_known = 1.0 if until or up else 0.0
        rows.append(
            (min(1.0, lost / before), min(1.0, joined / before), up / max(1, zone.peak), is_known)
        )
        at = until
    return rows


def node_window(node: NodeRecord, rows: ZoneRows, now_s: float, bin_s: float) -> Window:
    """The window of one working node from its zone's rows."""
    out, times = Window(), node.loss_times_s
    since = now_s if node.up_since_s is None else node.up_since_s
    first = now_s - len(rows) * bin_s
    at = bisect_right(times, first)
    for index, (lost, joined, up, is_known) in enumerate(rows):
        end = first + (index + 1) * bin_s
        until = bisect_right(times, end, lo=at)
        age = max(0.0, end - since)
        works = 1.0 if end >= since else 0.0
        own = log1p(until - at)
        long = min(2.0, age / (48 * bin_s))
        out.append((lost, joined, up, works, own, log1p(age / bin_s) / 10, long, is_known))
        at = until
    return out


Matrix = tuple[tuple[float, ...], ...]

_DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class BiLstm:
    """Weights as torch has them: gates in the order input, forget, cell, output."""

    input_weights: tuple[Matrix, Matrix]  # per direction (4 h, 8)
    state_weights: tuple[Matrix, Matrix]  # (4 h, h)
    biases: tuple[tuple[float, ...], tuple[float, ...]]  # (4 h), both of torch's added
    head: tuple[float, ...]  # (2 h) and the last one for the bias
    bin_s: float  # of the window
    bins: int  # of the window
    horizon_s: float  # what it was trained for
    name: str = "bi-lstm"

    def probability(self, window: Window, horizon_s: float) -> float:
        """The chance that the node of this window is lost within `horizon_s`."""
        return rescale(self.probabilities([window])[0], self.horizon_s, horizon_s)

    def probabilities(self, windows: Sequence[Window]) -> list[float]:
        """The chance of each window (n of (bins, 8)) within the horizon of the training."""
        import numpy as np

        data = np.asarray(windows, dtype=np.float64)
        ends = []
        for way in range(2):
            w, u = np.asarray(self.input_weights[way]), np.asarray(self.state_weights[way])
            bias = np.asarray(self.biases[way])
            hidden = np.zeros((len(data), u.shape[1]))
            cell = np.zeros_like(hidden)
            order = range(data.shape[1]) if way == 0 else range(data.shape[1] - 1, -1, -1)
            for index in order:
                gates = data[:, index] @ w.T + hidden @ u.T + bias
                i, f, g, o = np.split(gates, 4, axis=1)
                cell = _sigmoid(f) * cell + _sigmoid(i) * np.tanh(g)
                hidden = _sigmoid(o) * np.tanh(cell)
            ends.append(hidden)
        head = np.asarray(self.head)
        logits = np.concatenate(ends, axis=1) @ head[:-1] + head[-1]
        return [float(p) for p in _sigmoid(logits)]

    def to_json(self) -> dict[str, Any]:
        way = {
            name: {
                "input": self.input_weights[index],
                "state": self.state_weights[index],
                "bias": self.biases[index],
            }
            for index, name in enumerate(_DIRECTIONS)
        }
        times = {"bin_s": self.bin_s, "bins": self.bins, "horizon_s": self.horizon_s}
        return {"name": self.name, **way, "head": self.head, **times}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> BiLstm:
        """Read what `to_json` wrote. Raises KeyError, TypeError and ValueError."""
        first, second = (value[name] for name in _DIRECTIONS)
        model = BiLstm(
            (_matrix(first["input"]), _matrix(second["input"])),
            (_matrix(first["state"]), _matrix(second["state"])),
            (tuple(map(float, first["bias"])), tuple(map(float, second["bias"]))),
            tuple(map(float, value["head"])),
            float(value["bin_s"]),
            int(value["bins"]),
            float(value["horizon_s"]),
        )
        width = len(model.state_weights[0][0])
        shapes = [(len(each), len(row)) for each in model.input_weights for row in each] + [
            (len(each), len(row) - width + SIGNALS_PER_BIN)
            for each in model.state_weights
            for row in each
        ]
        if set(shapes) != {(4 * width, SIGNALS_PER_BIN)} or len(model.head) != 2 * width + 1:
            raise ValueError("the weights of the LSTM do not fit together")
        return model


def _matrix(rows: Any) -> Matrix:
    return tuple(tuple(map(float, row)) for row in rows)


def _sigmoid(x: Any) -> Any:
    import numpy as np

    return 0.5 * (1.0 + np.tanh(0.5 * x))

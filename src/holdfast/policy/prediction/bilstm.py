"""A bidirectional LSTM on the signals of a node, without torch. Pure.

Graves and Schmidhuber, Neural Networks 18(5), 2005. One layer each way over a window of bins
(`windows`), the two last states, one linear layer to a logit. Training is in
`holdfast_lab.prediction.bilstm`; the agent that uses a model imports no torch, so the pass forward
is written out here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.policy.prediction.models import rescale
from holdfast.policy.prediction.windows import SIGNALS_PER_BIN, Window

Matrix = tuple[tuple[float, ...], ...]

_DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class BiLstm:
    """Weights as torch has them: gates in the order input, forget, cell, output.

    input_weights: per direction (4 h, 8). state_weights: (4 h, h). biases: (4 h), both of torch's
    added. head: (2 h) and the last one for the bias. bin_s, bins: of the window. horizon_s: what
    it was trained for.
    """

    input_weights: tuple[Matrix, Matrix]
    state_weights: tuple[Matrix, Matrix]
    biases: tuple[tuple[float, ...], tuple[float, ...]]
    head: tuple[float, ...]
    bin_s: float
    bins: int
    horizon_s: float
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

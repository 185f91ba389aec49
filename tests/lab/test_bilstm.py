"""The Bi-LSTM: the pass without torch equals torch's, and training learns what can be learnt."""

from __future__ import annotations

import json
import random

import pytest
import torch
from torch import nn

from holdfast.policy.prediction.bilstm import SIGNALS_PER_BIN, BiLstm
from holdfast_lab.prediction.bilstm import _Network, _to_pure, train_bilstm

BINS = 3


def windows(many: int, seed: int) -> list[list[tuple[float, ...]]]:
    draw = random.Random(seed)
    return [
        [tuple(draw.random() for _ in range(SIGNALS_PER_BIN)) for _ in range(BINS)]
        for _ in range(many)
    ]


def test_the_pass_without_torch_is_the_same() -> None:
    torch.manual_seed(3)
    network = _Network()
    pure = _to_pure(network, 5.0, BINS, 10.0)
    data = windows(20, 1)
    with torch.no_grad():
        expected = torch.sigmoid(network(torch.tensor(data))).tolist()
    assert pure.probabilities(data) == pytest.approx(expected, abs=1e-6)
    read = BiLstm.from_json(json.loads(json.dumps(pure.to_json())))
    assert read == pure
    assert read.probability(data[0], 5.0) == pytest.approx(1 - (1 - expected[0]) ** 0.5, abs=1e-6)
    with pytest.raises(ValueError, match="do not fit"):
        BiLstm.from_json({**pure.to_json(), "head": [0.0]})
    assert isinstance(network.lstm, nn.LSTM)


def test_training_learns_a_signal_and_leaves_the_global_generator() -> None:
    data = windows(1500, 2)
    lost = [window[-1][0] > 0.7 for window in data]
    before = torch.get_rng_state()
    made = train_bilstm(data, lost, [1.0] * len(data), 5.0, 10.0)
    assert torch.equal(torch.get_rng_state(), before)
    fresh = windows(200, 5)
    chances = made.probabilities(fresh)
    right = [p for p, window in zip(chances, fresh, strict=True) if window[-1][0] > 0.7]
    wrong = [p for p, window in zip(chances, fresh, strict=True) if window[-1][0] <= 0.7]
    assert sum(right) / len(right) > 0.6
    assert sum(wrong) / len(wrong) < 0.3

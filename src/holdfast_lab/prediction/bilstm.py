"""Trains the bidirectional LSTM of `policy.prediction.bilstm` on windows of node signals.

Weighted cross-entropy, Adam, the epoch with the least loss on the last sixth of the samples in
order of time. The seed decides everything; the global generator is left as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from holdfast.policy.prediction.bilstm import SIGNALS_PER_BIN, BiLstm, Matrix, Window

HIDDEN = 16
BATCH = 256
RATE = 3e-3
WEIGHT_DECAY = 1e-3
EPOCHS = 40
MAX_BATCHES = 4000  # A large set gets fewer epochs: at most so many batches in all
PATIENCE = 6  # epochs without a better loss until training ends
STOP_SHARE = 1 / 6


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(SIGNALS_PER_BIN, HIDDEN, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * HIDDEN, 1)

    def forward(self, windows: Tensor) -> Tensor:
        """(n, bins, 8) -> (n) logits, from the last state of each direction."""
        _, (last, _) = self.lstm(windows)
        logits: Tensor = self.head(torch.cat([last[0], last[1]], dim=1))
        return logits.squeeze(1)


def train_bilstm(
    windows: Sequence[Window],
    lost: Sequence[bool],
    weights: Sequence[float],
    bin_s: float,
    horizon_s: float,
    seed: int = 0,
) -> BiLstm:
    """Train on windows (n of (bins, 8)) in order of time.

    lost: whether the node was lost within the horizon. weights: of each sample in the loss.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = _fit(
            torch.tensor(windows, dtype=torch.float32),
            torch.tensor(lost, dtype=torch.float32),
            torch.tensor(weights, dtype=torch.float32),
        )
    return _to_pure(network, bin_s, len(windows[0]), horizon_s)


def _fit(x: Tensor, y: Tensor, w: Tensor) -> _Network:
    network = _Network()
    cut = max(1, int(len(x) * (1 - STOP_SHARE)))
    rate = float((w[:cut] * y[:cut]).sum() / w[:cut].sum())
    with torch.no_grad():  # begin with the base rate
        network.head.bias.fill_(torch.logit(torch.tensor(min(0.99, max(1e-5, rate)))).item())
    optimizer = torch.optim.Adam(network.parameters(), lr=RATE, weight_decay=WEIGHT_DECAY)
    loss_of = nn.BCEWithLogitsLoss(reduction="none")
    best, kept, worse = float("inf"), network.state_dict(), 0
    batches = -(-cut // BATCH)
    for _ in range(min(EPOCHS, max(2, MAX_BATCHES // batches))):
        for chosen in torch.split(torch.randperm(cut), BATCH):
            optimizer.zero_grad()
            loss = (w[chosen] * loss_of(network(x[chosen]), y[chosen])).sum() / w[chosen].sum()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
        with torch.no_grad():
            later = slice(cut, None) if cut < len(x) else slice(None)
            logits = torch.cat([network(part) for part in torch.split(x[later], 4096)])
            score = float((w[later] * loss_of(logits, y[later])).sum() / w[later].sum())
        if score < best - 1e-5:
            best, worse = score, 0
            kept = {name: value.clone() for name, value in network.state_dict().items()}
        elif (worse := worse + 1) >= PATIENCE:
            break
    network.load_state_dict(kept)
    return network


def _to_pure(network: _Network, bin_s: float, bins: int, horizon_s: float) -> BiLstm:
    state = network.state_dict()

    def matrix(name: str) -> Matrix:
        return tuple(tuple(map(float, row)) for row in state[name])

    def bias(end: str) -> tuple[float, ...]:
        return tuple(map(float, state[f"lstm.bias_ih_l0{end}"] + state[f"lstm.bias_hh_l0{end}"]))

    return BiLstm(
        (matrix("lstm.weight_ih_l0"), matrix("lstm.weight_ih_l0_reverse")),
        (matrix("lstm.weight_hh_l0"), matrix("lstm.weight_hh_l0_reverse")),
        (bias(""), bias("_reverse")),
        (*map(float, state["head.weight"][0]), float(state["head.bias"][0])),
        bin_s,
        bins,
        horizon_s,
    )

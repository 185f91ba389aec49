"""A task of one's own: which of three spirals does a point lie on? See docs/guide/python.md."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import holdfast


class Points:
    """3,000 points that are made from their index, so there is nothing to download."""

    version = "spirals-1"

    def __len__(self) -> int:
        return 3000

    def __getitem__(self, index: int) -> Mapping[str, Tensor | int]:
        arm, radius = index % 3, 0.2 + 0.8 * index / 3000
        noise = torch.randn(2, generator=torch.Generator().manual_seed(index)) * 0.02
        angle = arm * 2 * math.pi / 3 + 5 * radius
        point = torch.tensor([radius * math.cos(angle), radius * math.sin(angle)])
        return {"point": point + noise, "arm": arm}


class Spirals(holdfast.Task):
    """hidden: width of the net. dropout: in training."""

    def __init__(self, hidden: int = 64, dropout: float = 0.1) -> None:
        self.hidden, self.dropout = hidden, dropout

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(2, self.hidden),
            nn.SiLU(),
            nn.Dropout(self.dropout),
            nn.Linear(self.hidden, self.hidden),
            nn.SiLU(),
            nn.Linear(self.hidden, 3),
        )

    def data(self) -> Points:
        return Points()

    def loss(self, model: nn.Module, batch: holdfast.Batch) -> Tensor:
        return F.cross_entropy(model(batch["point"]), batch["arm"], reduction="sum")


if __name__ == "__main__":  # the workers import this file, too
    result = holdfast.train(Spirals, "run.yaml", args={"hidden": 32})
    model = Spirals(hidden=32).model().eval()
    model.load_state_dict(holdfast.open_checkpoint(result.folder).parameters())
    items = [Points()[i] for i in range(0, 3000, 7)]
    found = model(torch.stack([torch.as_tensor(item["point"]) for item in items])).argmax(1)
    right = sum(int(a) == item["arm"] for a, item in zip(found, items, strict=True))
    print(f"step {result.step}: {right / len(items):.0%} of {len(items)} points are right")

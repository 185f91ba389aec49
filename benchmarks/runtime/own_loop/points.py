"""The dataset of the scripts in this folder."""

from __future__ import annotations

import torch
from torch import Tensor


class Points:
    """Points of a plane, and which third of the circle each lies in."""

    version = "points-1"

    def __len__(self) -> int:
        return 3000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        point = torch.randn(2, generator=torch.Generator().manual_seed(index))
        third = ((point[1].atan2(point[0]) / torch.pi + 1) * 1.5).clamp(0, 2.999)
        return {"x": point, "y": third.long()}

"""Classes and functions that a run file names by their path, loaded (`tasks/named.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.lr_schedule import RateFunction
from holdfast.train.torch_optimizer import MakeOptimizer


@dataclass(frozen=True)
class UserParts:
    """None: the run file names one of ours."""

    optimizer: MakeOptimizer | None = None
    schedule: RateFunction | None = None

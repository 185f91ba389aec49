"""The random generators that a user's code draws from: those of torch, Python and numpy."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_generators(key: int) -> None:
    """Begin all of them from a seed, so that what is drawn depends on no process and no time."""
    torch.manual_seed(key)
    random.seed(key)
    np.random.seed(key % 2**32)

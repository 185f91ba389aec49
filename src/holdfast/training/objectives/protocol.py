"""What an objective is: a function of the log-probabilities of targets.

docs/internals/post-training.md has the contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Side = Mapping[str, Tensor]
"""Named tensors [B, S], aligned with targets."""
Combine = Callable[[Tensor], Tensor]
"""Adds a float64 tensor up over the ranks that share a microbatch's samples. The same on each."""


@dataclass(frozen=True)
class Loss:
    """What an objective returns for a microbatch."""

    total: Tensor  # float64 scalar: a sum over rows or tokens, with a gradient
    # name -> (float64 sum, count); the names are those of the objective
    sums: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


class Objective(Protocol):
    """A loss of log-probabilities. All of it is a pure function."""

    names: tuple[str, ...]  # of its sums, in the order of the account
    needs: Set[str]  # side tensors of a microbatch
    needs_entropy: bool  # the engine adds `entropies`
    trains_entropy: bool  # the loss has a gradient with respect to them

    def __call__(self, logps: Tensor, targets: Tensor, documents: Tensor, side: Side) -> Loss:
        """logps, targets, documents: [B, S] -> the loss of a microbatch"""
        ...

    def weigh(
        self,
        targets: NDArray[np.int64],
        documents: NDArray[np.int32],
        side: Mapping[str, NDArray[Any]],
    ) -> int:
        """What a microbatch adds to the divisor of a step. It runs on the loader's thread."""
        ...

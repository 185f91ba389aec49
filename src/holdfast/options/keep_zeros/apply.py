"""Zeros of a pruned model stay zero.

Which weights are zero is a function of the state alone. There is no mask to store, and a worker
that resumes sees the same ones. A gradient is multiplied by 0 there before its norm is taken. NaN
stays NaN, so a step with it is refused as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from holdfast.config.run import RunConfig
from holdfast.options.protocols import Apply
from holdfast.training.engine.engine import StepEngine


def keep_zeros(config: RunConfig, engine: StepEngine) -> None:
    """Let the engine's update leave zeros alone."""
    table = engine.parameters.table
    chosen = [i for i, row in enumerate(table) if len(row.shape) > 1 and not row.merge]

    @torch.no_grad()
    def mask(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        for i in chosen:
            gradients[i].mul_(weights[i] != 0)

    @contextmanager
    def keep(weights: Sequence[Tensor]) -> Iterator[None]:
        zeros = [weights[i] == 0 for i in chosen]
        yield
        with torch.no_grad():
            for i, zero in zip(chosen, zeros, strict=True):
                weights[i].masked_fill_(zero, 0.0)

    engine.on_summed, engine.around_update = mask, keep


APPLY = Apply(engine=keep_zeros)

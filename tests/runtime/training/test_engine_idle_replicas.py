"""Fewer microbatches than replicas: some are idle, in a step and in a validation, and change
nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from holdfast.training.engine.engine import StepEngine
from holdfast.training.engine.evaluate import Evaluation, Evaluator, TokenValidation
from tests.support.ranks import RankContext, rank_values
from tests.support.tiny_training import CPU, LENGTH, VOCABULARY, digest, engine, one_step, tiny

WARM = [
    {"from_step": 1, "batch_size": 2},  # one microbatch
    {"from_step": 3, "batch_size": 10},
    {"from_step": 5, "batch_size": 4},
]


@dataclass(frozen=True)
class Rows:
    inputs: np.ndarray[Any, np.dtype[np.int64]]
    targets: np.ndarray[Any, np.dtype[np.int64]]
    documents: None = None
    side: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)


class Text:
    """Validation of one microbatch of two samples."""

    def __init__(self) -> None:
        tokens = np.random.default_rng(5).integers(0, VOCABULARY, (2, LENGTH + 1))
        self.microbatches = [Rows(tokens[:, :-1].copy(), tokens[:, 1:].copy())]
        self.tokens = 2 * LENGTH

    def bits_per_byte(self, nats: float) -> float:
        return nats


def _validated(made: StepEngine) -> Evaluation:
    text = TokenValidation(Text())
    found = Evaluator(made.objective, made.executor, made.groups, text, CPU).run()
    assert found is not None
    return found


def _curve(rank: RankContext, dp_shard: int, **changes: Any) -> list[str]:
    """Norm and validation loss of each step, and the state at the end."""
    replicas = rank.world_size // dp_shard
    config = tiny(train__batch_warmup=WARM, **changes)
    made = engine(config, rank.rank, rank.store(), replicas=replicas, dp_shard=dp_shard)
    out = []
    for step in range(1, 7):
        norm = one_step(made, step).norm
        out.append(f"{norm.hex()} {_validated(made).loss.hex()}")
    out.append(digest(made))
    made.close()
    return out


def test_idle_replicas_change_no_bit() -> None:
    curves = {
        tuple(curve)
        for replicas in (1, 2, 4)
        for curve in rank_values(_curve, replicas, {"dp_shard": 1})
    }
    assert len(curves) == 1


def test_an_idle_sharded_replica_changes_no_bit_dpshard2() -> None:
    (first, second) = rank_values(_curve, 2, {"dp_shard": 2})
    assert rank_values(_curve, 4, {"dp_shard": 2}) == [first, second, first, second]


@pytest.mark.parametrize("replicas", [1, 3])
def test_idle_replicas_are_nothing_to_the_fast_reduction(replicas: int) -> None:
    (whole,) = rank_values(_curve, 1, {"dp_shard": 1})
    for curve in rank_values(_curve, replicas, {"dp_shard": 1, "layout__reduction": "fast"}):
        for got, want in zip(curve[:-1], whole[:-1], strict=True):
            numbers = [[float.fromhex(word) for word in line.split()] for line in (got, want)]
            assert numbers[0] == pytest.approx(numbers[1], rel=1e-4)

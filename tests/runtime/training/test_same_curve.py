"""Promise 1: the state after step N depends on the run file alone.

Clipping is active in every step of every case here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.core.sharding.reduction_tree import Shares
from holdfast.training.engine.precision import same_products_on_any_threads
from tests.support.ranks import RankContext, rank_values
from tests.support.tiny_training import Fed, digest, engine, tiny, train

STEPS = 6  # four while the learning rate rises, two while it falls

ODD: dict[int, Shares] = {
    2: ((0, 3, 4, 5, 8), (1, 2, 6, 7, 9, 10, 11)),
    3: ((), (11, 0, 5, 6), (1, 2, 3, 4, 7, 8, 9, 10)),
    4: ((0, 11), (1, 2, 3), (4, 9, 10), (5, 6, 7, 8)),
    6: ((0, 1, 2), (3,), (4, 5), (), (6, 7, 8, 9), (11, 10)),
}


def _curve(made: Any) -> list[str]:
    """Every loss and norm in full precision, and the state's digest at the end."""
    verdicts = train(made, STEPS)
    clip = made.train.optimizer.clip_norm
    assert all(v.mean_norm > clip for v in verdicts)
    assert verdicts[-1].mean_loss < verdicts[0].mean_loss
    return [f"{v.mean_loss.hex()} {v.norm.hex()} {v.tokens}" for v in verdicts] + [digest(made)]


def _replicated(rank: RankContext, dealings: list[Any], **changes: Any) -> list[list[str]]:
    out = []
    for number, dealing in enumerate(dealings):
        store = rank.store(f"world{number}")
        shares = None if dealing is None else [tuple(tuple(share) for share in dealing)]
        made = engine(tiny(**changes), rank.rank, store, replicas=rank.world_size, shares=shares)
        out.append(_curve(made))
        made.close()
    return out


@pytest.mark.parametrize(
    ("precision", "sizes", "odd"), [("fp32", (1, 2, 3, 4, 6), True), ("bf16", (1, 3), False)]
)
def test_bit_equal_for_any_number_of_replicas_and_any_dealing(
    precision: str, sizes: tuple[int, ...], odd: bool
) -> None:
    curves: set[tuple[str, ...]] = set()
    for replicas in sizes:
        dealings = [None, ODD[replicas]] if odd and replicas > 1 else [None]
        arguments = {"dealings": dealings, "train__precision": precision}
        for values in rank_values(_replicated, replicas, arguments):
            curves.update(tuple(curve) for curve in values)
    assert len(curves) == 1


def _on_threads(rank: RankContext, threads: int) -> list[str]:
    """Matrices that are large enough for MKL to cut their products."""
    same_products_on_any_threads()
    torch.set_num_threads(threads)
    large = {
        "model__dim": 128,
        "model__heads": 4,
        "model__kv_heads": 2,
        "model__ffn_dim": 384,
        "model__vocab_size": 1024,
        "data__sequence_length": 128,
    }
    made = engine(tiny(**large), rank.rank, rank.store())
    share = made.begin(1)
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in share:
        tokens = torch.randint(0, 1024, (2, 129), generator=generator)
        batches.append(Fed(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None, 256))
    made.compute(batches)
    made.apply(made.reduce())
    return [digest(made)]


def test_bit_equal_on_any_number_of_threads_per_worker() -> None:
    """A worker has cores / workers threads, so their number changes with that of the workers."""
    one, two = (rank_values(_on_threads, 1, {"threads": threads}) for threads in (1, 2))
    assert one == two

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


def test_bit_equal_for_1_2_3_4_6_replicas_and_any_dealing() -> None:
    curves: set[tuple[str, ...]] = set()
    for replicas in (1, 2, 3, 4, 6):
        dealings = [None] if replicas == 1 else [None, ODD[replicas]]
        for values in rank_values(_replicated, replicas, {"dealings": dealings}):
            curves.update(tuple(curve) for curve in values)
    assert len(curves) == 1


def test_bit_equal_in_bf16_mixed_precision_too() -> None:
    curves: set[tuple[str, ...]] = set()
    for replicas in (1, 3):
        arguments = {"dealings": [None], "train__precision": "bf16"}
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


def _sharded(rank: RankContext, dp_shard: int, dealing: Any, **changes: Any) -> list[str]:
    replicas = rank.world_size // dp_shard
    shares = None if dealing is None else [tuple(tuple(share) for share in dealing)]
    made = engine(
        tiny(**changes),
        rank.rank,
        rank.store(),
        replicas=replicas,
        dp_shard=dp_shard,
        shares=shares,
    )
    curve = _curve(made)
    made.close()
    return curve


@pytest.mark.slow
def test_replicas_of_one_sharding_are_bit_equal_dpshard2() -> None:
    by_shard: dict[int, set[tuple[str, ...]]] = {0: set(), 1: set()}
    for replicas, dealing in ((1, None), (2, ODD[2]), (3, ODD[3])):
        arguments = {"dp_shard": 2, "dealing": dealing}
        for rank, curve in enumerate(rank_values(_sharded, 2 * replicas, arguments)):
            by_shard[rank % 2].add(tuple(curve))
    assert {shard: len(curves) for shard, curves in by_shard.items()} == {0: 1, 1: 1}


def _sharded_state(rank: RankContext, dp_shard: int, **changes: Any) -> list[Any]:
    """Losses, and every state tensor as (name, offsets, values)."""
    replicas = rank.world_size // dp_shard
    made = engine(tiny(**changes), rank.rank, rank.store(), replicas=replicas, dp_shard=dp_shard)
    verdicts = train(made, STEPS)
    state = [(t.name, list(t.offsets), t.tensor.tolist()) for t in made.state()]
    made.close()
    return [[v.mean_loss for v in verdicts], [v.mean_norm for v in verdicts], state]


@pytest.mark.parametrize(
    ("dp_shard", "changes"),
    [
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(2, {"layout__zero": 2}, marks=pytest.mark.slow),
        (4, {"train__microbatch_size": 4, "model__ffn_dim": 22, "model__qk_norm": True}),
    ],
)
def test_sharded_equals_unsharded_in_float64(dp_shard: int, changes: dict[str, Any]) -> None:
    changes = {"train__precision": "float64", **changes}
    ((losses, norms, state),) = rank_values(_sharded_state, 1, {"dp_shard": 1, **changes})
    whole = {name: torch.tensor(values, dtype=torch.float64) for name, _, values in state}
    parts = rank_values(_sharded_state, dp_shard, {"dp_shard": dp_shard, **changes})
    for other_losses, other_norms, other_state in parts:
        torch.testing.assert_close(
            torch.tensor(other_losses), torch.tensor(losses), rtol=1e-10, atol=0
        )
        torch.testing.assert_close(
            torch.tensor(other_norms), torch.tensor(norms), rtol=1e-10, atol=0
        )
        for name, offsets, values in other_state:
            part = torch.tensor(values, dtype=torch.float64)
            if part.numel() == 0:
                continue
            want = whole[name].narrow(0, offsets[0], part.shape[0])
            error = (part - want).norm() / want.norm()
            assert float(error) < 1e-10, name
    for name, tensor in whole.items():
        held = sum(len(v) for _, _, s in parts for n, _, v in s if n == name)
        assert held == tensor.shape[0]

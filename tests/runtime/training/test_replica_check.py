"""Silent corruption: one bit or 1e-9 in one tensor of one rank is found and named, by all ranks
alike, and nothing else ever is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.state_table import local_boxes, state_table
from holdfast.layout import Layout, place_layout, place_replicas
from holdfast.training.engine.engine import StepEngine
from holdfast.training.engine.replica_check import (
    ReplicaChecker,
    ReplicaMismatch,
    outlier_ranks,
    outliers,
)
from tests.support.layouts import case, config_of, engine_for, one_step
from tests.support.ranks import RankContext, rank_values
from tests.support.topologies import tiny


@contextmanager
def _changed(made: StepEngine, name: str, how: str) -> Iterator[None]:
    """The tensor `name` of this rank, with one element changed for a while."""
    flat = next(s.tensor for s in made.state() if s.name == name).view(-1)
    with torch.no_grad():
        before = flat.clone()
        if how == "bit":
            flat.view(torch.int64)[-1] ^= 1
        else:
            flat[-1] += 1e-9
        yield
        flat.copy_(before)


def _checked(rank: RankContext, name: str, at: int, tensor: str) -> list[Any]:
    """Findings of: two steps of training; a bit; 1e-9; and of nothing again."""
    config = config_of(case(name).changes)
    made = engine_for(rank, name, config)
    checks = ReplicaChecker(made.groups.topology, state_table(config.model, config.train.precision))
    out = [checks.check(made.groups, made.state())]
    for step in (1, 2):
        one_step(made, step)
        out.append(checks.check(made.groups, made.state()))
    for how in ("bit", "add"):
        if rank.rank == at:
            with _changed(made, tensor, how):
                out.append(checks.check(made.groups, made.state()))
        else:
            out.append(checks.check(made.groups, made.state()))
    out.append(checks.check(made.groups, made.state()))
    made.close()
    return [[list(outlier_ranks(found)), [list(f.tensors) for f in found]] for found in out]


@pytest.mark.parametrize(
    ("name", "at", "tensor", "odd"),
    [
        ("dp3", 1, "model.layers.2.ffn.up.weight", [1]),
        ("dp2", 1, "optimizer.exp_avg.embed.weight", [0, 1]),
        ("tp2+one+one", 3, "model.layers.0.attention.q.weight", [3]),
        ("pp2+shard2+one", 1, "optimizer.exp_avg_sq.norm.weight", [1]),
    ],
)
def test_the_odd_one_out_is_named(name: str, at: int, tensor: str, odd: list[int]) -> None:
    size = case(name).world_size
    for findings in rank_values(_checked, size, {"name": name, "at": at, "tensor": tensor}):
        *trained, bit, add, after = findings
        assert [*trained, after] == [[[], []]] * 4
        for found in (bit, add):
            assert found[0] == odd
            assert found[1]
            assert all(tensors == [tensor] for tensors in found[1])


def test_the_majority_is_right() -> None:
    assert outliers({0: 5, 1: 5, 2: 5}) == ()
    assert outliers({0: 5, 1: 6, 2: 5}) == (1,)
    assert outliers({0: 5, 1: 6}) == (0, 1)
    assert outliers({0: 5, 1: 5, 2: 6, 3: 6}) == (0, 1, 2, 3)
    assert outliers({0: 5, 1: 6, 2: 7}) == (0, 1, 2)
    sure = ReplicaMismatch((2,), (0, 2, 3), ("a",))
    assert outlier_ranks([ReplicaMismatch((1, 2), (1, 2), ("b",)), sure]) == (2,)


def test_everything_that_is_held_twice_is_compared_once() -> None:
    """Against a count of single elements, with unlike replicas side by side."""
    model = tiny(tied_embeddings=True)
    layouts = [Layout(tp=2), Layout(pp=2, dp_shard=2, stages=(2, 1)), Layout()]
    topology, table = place_replicas(layouts, 1, ("n",) * 7), state_table(model)
    holders: dict[tuple[object, ...], set[int]] = {}
    for rank in range(7):
        for box in local_boxes(topology, table, rank):
            for element in _elements(box):
                holders.setdefault(element, set()).add(rank)
    seen: dict[tuple[object, ...], set[int]] = {}
    for ranks, boxes in ReplicaChecker(topology, table).shared_boxes.items():
        for box in boxes:
            for element in _elements(box):
                assert element not in seen
                seen[element] = set(ranks)
    assert seen == {element: ranks for element, ranks in holders.items() if len(ranks) > 1}


def _elements(box: Box) -> list[tuple[object, ...]]:
    spans = [range(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True)]
    grid = torch.cartesian_prod(*(torch.tensor(list(s)) for s in spans)) if box.size else []
    return [(box.name, *(row.tolist() if row.dim() else [int(row)])) for row in grid]


def test_alike_replicas_say_one_word_each() -> None:
    topology = place_layout(Layout(dp_replicate=3, pp=2, dp_shard=2, stages=(2, 1)), 1, ("n",) * 12)
    shared = ReplicaChecker(topology, state_table(tiny())).shared_boxes
    assert list(shared) == [(at, at + 4, at + 8) for at in range(4)]

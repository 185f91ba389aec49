"""Balanced pipeline stages: against every possible split, and where embedding and head matter."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config.sections.model import ModelConfig
from holdfast.core.flops import flops_per_token
from holdfast.core.sharding.parameters import count_parameters
from holdfast.core.sharding.pipeline_stages import (
    BlockCosts,
    block_costs,
    check_number_of_stages,
    split_stages,
)
from holdfast.errors import LayoutError


def splits(blocks: int, stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, blocks), stages - 1):
        ends = (0, *cuts, blocks)
        yield tuple(b - a for a, b in pairwise(ends))


def merit(costs: BlockCosts, stages: tuple[int, ...]) -> tuple[float, float, tuple[int, ...]]:
    """(slowest stage, largest stage, the split itself): the smallest is the best."""
    times, sizes, start = [], [], 0
    for held in stages:
        times.append(sum(costs.times[start : start + held]))
        sizes.append(sum(costs.parameters[start : start + held]))
        start += held
    for row, index in ((times, 0), (sizes, 1)):
        row[0] += costs.first[index]
        row[-1] += costs.last[index]
    return max(times), max(sizes), stages


whole = st.integers(0, 9)


@given(
    rows=st.lists(st.tuples(st.integers(1, 9), whole), min_size=1, max_size=8),
    ends=st.tuples(whole, whole, whole, whole),
    data=st.data(),
)
def test_no_split_is_better(
    rows: list[tuple[int, int]], ends: tuple[int, int, int, int], data: st.DataObject
) -> None:
    costs = BlockCosts(
        tuple(float(time) for time, _ in rows),
        tuple(size for _, size in rows),
        (float(ends[0]), ends[1]),
        (float(ends[2]), ends[3]),
    )
    stages = data.draw(st.integers(1, len(rows)))
    best = min(splits(len(rows), stages), key=lambda each: merit(costs, each))
    assert split_stages(costs, stages) == best


def model(**changes: object) -> ModelConfig:
    shape = {
        "preset": None,
        "layers": 8,
        "dim": 64,
        "heads": 4,
        "kv_heads": 2,
        "ffn_dim": 192,
        "vocab_size": 512,
    }
    return ModelConfig.model_validate(shape | changes)


def balance_stages(shape: ModelConfig, pp: int, length: int) -> tuple[int, ...]:
    check_number_of_stages(shape, pp)
    return split_stages(block_costs(shape, length), pp)


@given(st.integers(1, 12), st.integers(1, 12), st.sampled_from([0, 64, 512, 9000]))
def test_every_stage_holds_a_block_and_all_hold_all(layers: int, pp: int, vocabulary: int) -> None:
    shape = model(layers=layers, vocab_size=vocabulary)
    if pp > layers:
        with pytest.raises(LayoutError, match=f"use {layers} or less"):
            balance_stages(shape, pp, 128)
        return
    stages = balance_stages(shape, pp, 128)
    assert len(stages) == pp
    assert sum(stages) == layers
    assert min(stages) >= 1


def test_a_head_that_costs_nothing_leaves_equal_stages() -> None:
    assert balance_stages(model(vocab_size=0), 4, 128) == (2, 2, 2, 2)


def test_the_head_counts_as_what_it_costs() -> None:
    """A vocabulary whose head costs about three blocks takes three blocks off the last stage."""
    shape = model(layers=9)
    block, head = block_costs(shape, 128).times[0], block_costs(shape, 128).last[0]
    vocabulary = round(shape.vocab_size * 3 * block / head)
    assert balance_stages(model(layers=9, vocab_size=vocabulary), 2, 128) == (6, 3)
    assert balance_stages(model(layers=9, vocab_size=vocabulary), 3, 128) == (4, 4, 1)


def test_of_equally_fast_splits_the_embedding_goes_to_fewer_blocks() -> None:
    """Six blocks over four stages: two stages hold two. Neither is the one with the embedding."""
    assert balance_stages(model(layers=6, vocab_size=64), 4, 128) == (1, 2, 2, 1)


@pytest.mark.parametrize("tied", [False, True])
def test_costs_are_those_of_the_whole_model(tied: bool) -> None:
    shape = model(tied_embeddings=tied)
    costs = block_costs(shape, 128)
    assert sum(costs.times) + costs.last[0] == pytest.approx(flops_per_token(shape, 128, "causal"))
    held = sum(costs.parameters) + costs.first[1] + costs.last[1]
    assert held == count_parameters(shape) + (shape.vocab_size * shape.dim if tied else 0)

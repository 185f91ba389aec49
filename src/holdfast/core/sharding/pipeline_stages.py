"""Assigns blocks to pipeline stages: equal time, not equal numbers.

A pipeline runs at the pace of its slowest stage, so time is balanced. Time is FLOPs of a block
against those of the head (`core/flops.py`, causal attention counted once). In a small model with a
large vocabulary the head costs as much as many blocks. The embedding is a lookup and costs no time,
but its table needs memory. So among equally fast splits, the one whose largest stage has the fewest
parameters wins. Among those, the one with the fewest blocks on the first stages wins. An early
stage keeps the activations of the most microbatches (1F1B: Narayanan et al. 2021, arXiv 2104.04473,
section 2.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from holdfast.core.flops import flops_per_token
from holdfast.core.sharding.parameters import count_parameters
from holdfast.errors import LayoutError
from holdfast.layout import Stages

if TYPE_CHECKING:  # the mover has no use for pydantic
    from holdfast.config.model import ModelConfig


@dataclass(frozen=True)
class BlockCosts:
    """Time and parameters of every block, and of the embedding and the head on the end stages.

    Times are in any one unit (FLOPs per token here, measured seconds as well).
    """

    times: tuple[float, ...]
    parameters: tuple[int, ...]
    first: tuple[float, int] = (0.0, 0)
    last: tuple[float, int] = (0.0, 0)


def block_costs(model: ModelConfig, sequence_length: int) -> BlockCosts:
    """Costs by FLOPs of one training token in samples of `sequence_length`.

    A tied embedding table lies on both ends. With `vocab_size` 0 both ends count as nothing.
    """
    none, table = _with_layers(model, 0), model.vocab_rows * model.dim
    head = flops_per_token(none, sequence_length, "causal")
    of_kind: dict[bool, tuple[float, int]] = {}
    for kind in {model.has_experts(block) for block in range(model.layers)}:
        one = _with_layers(model, 1, has_experts=kind)
        time = flops_per_token(one, sequence_length, "causal") - head
        of_kind[kind] = time, count_parameters(one) - count_parameters(none)
    costs = [of_kind[model.has_experts(block)] for block in range(model.layers)]
    return BlockCosts(
        times=tuple(time for time, _ in costs),
        parameters=tuple(parameters for _, parameters in costs),
        first=(0.0, table),
        last=(head, table + model.dim),
    )


def _with_layers(model: ModelConfig, layers: int, *, has_experts: bool = False) -> ModelConfig:
    """The model with so many blocks, all of one kind."""
    experts = model.experts.model_copy(update={"first": 0}) if model.experts else None
    kept = experts if has_experts else None
    return model.model_copy(update={"layers": layers, "experts": kept})


def balance_stages(model: ModelConfig, pp: int, sequence_length: int) -> Stages:
    """Blocks of each of `pp` stages, all at least 1. Raises LayoutError for too many stages."""
    if not 1 <= pp <= model.layers:
        raise LayoutError(
            f"{pp} stages cannot share {model.layers} blocks",
            where="layout.pp",
            remedy=f"use {model.layers} or less",
        )
    return split_stages(block_costs(model, sequence_length), pp)


def split_stages(costs: BlockCosts, stages: int) -> Stages:
    """The best contiguous split, by dynamic programming over (stages, blocks given out).

    Three passes: the least possible time of the slowest stage; under it the least parameters of
    the largest stage; under both the smallest first stages. O(stages * blocks^2).
    """
    blocks = len(costs.times)
    before = [list(accumulate(row, initial=0)) for row in (costs.times, costs.parameters)]

    def cost(which: int, stage: int, start: int, stop: int) -> float:
        """Time (0) or parameters (1) of a stage that holds blocks [start, stop)."""
        inner = before[which][stop] - before[which][start]
        ends = (costs.first[which] if stage == 0 else 0) + (
            costs.last[which] if stage == stages - 1 else 0
        )
        return inner + ends

    def time(stage: int, start: int, stop: int) -> float:
        return cost(0, stage, start, stop)

    # sums may differ in the end
    slowest = _least_bottlenecks(blocks, stages, time)[0][0] * (1 + 1e-12)

    def parameters(stage: int, start: int, stop: int) -> float:
        fits = time(stage, start, stop) <= slowest
        return cost(1, stage, start, stop) if fits else float("inf")

    rest = _least_bottlenecks(blocks, stages, parameters)
    largest, out, start = rest[0][0], [], 0
    for stage in range(stages):
        stop = next(
            stop
            for stop in range(start + 1, blocks + 1)
            if max(parameters(stage, start, stop), rest[stage + 1][stop]) <= largest
        )
        out.append(stop - start)
        start = stop
    return tuple(out)


def _least_bottlenecks(
    blocks: int, stages: int, cost: Callable[[int, int, int], float]
) -> Sequence[Sequence[float]]:
    """[stage][start]: the least possible largest cost of stages `stage` and after, when they hold
    the blocks from `start` on; infinite where they cannot."""
    infinite = float("inf")
    rest = [[infinite] * (blocks + 1) for _ in range(stages + 1)]
    rest[stages][blocks] = 0.0
    for stage in reversed(range(stages)):
        for start in range(blocks):
            rest[stage][start] = min(
                max(cost(stage, start, stop), rest[stage + 1][stop])
                for stop in range(start + 1, blocks + 1)
            )
    return rest

"""Assigns blocks to pipeline stages: equal time or equal memory, not equal numbers.

A pipeline runs at the pace of its slowest stage, so time is balanced. Time is FLOPs of a block
against those of the head (`core/flops.py`, causal attention counted once). In a small model with a
large vocabulary the head costs as much as many blocks. The embedding is a lookup and costs no time,
but its table needs memory. So among equally fast splits, the one whose largest stage has the fewest
parameters wins. Among those, the one with the fewest blocks on the first stages wins. An early
stage keeps the activations of the most microbatches (1F1B: Narayanan et al. 2021, arXiv 2104.04473,
section 2.2).

`best_split` does this for any two costs of a stage. `plan/placing/balance.py` gives it those
that the run file asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from holdfast.core.flops import flops_per_token
from holdfast.core.sharding.parameters import count_parameters
from holdfast.errors import LayoutError
from holdfast.layout import Stages

if TYPE_CHECKING:  # the mover has no use for pydantic
    from holdfast.config.sections.model import ModelConfig
    from holdfast.config.sections.recompute import RecomputePolicy


@dataclass(frozen=True)
class BlockCosts:
    """Time and parameters of every block, and of the embedding and the head on the end stages.

    Times are in any one unit (FLOPs per token here, measured seconds as well).
    """

    times: tuple[float, ...]
    parameters: tuple[int, ...]
    first: tuple[float, int] = (0.0, 0)
    last: tuple[float, int] = (0.0, 0)

    def cost(self, which: int, stages: int, stage: int, start: int, stop: int) -> float:
        """Time (0) or parameters (1) of one of so many stages, if it has blocks [start, stop)."""
        before = self._sums[which]
        ends = self.first[which] if stage == 0 else 0
        ends += self.last[which] if stage == stages - 1 else 0
        return before[stop] - before[start] + ends

    @cached_property
    def _sums(self) -> tuple[tuple[float, ...], ...]:
        rows = (self.times, self.parameters)
        return tuple(tuple(accumulate(row, initial=0)) for row in rows)


StageCost = Callable[[int, int, int], float]
"""(stage, first block, block after the last) -> what that stage costs with these blocks. It costs
no less with more of them."""


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


def times_again(
    model: ModelConfig, sequence_length: int, policy: RecomputePolicy
) -> tuple[float, ...]:
    """Return the FLOPs per token that the backward pass of each block runs again. The forward pass
    is a third of a block's FLOPs. What it keeps of products and of attention is not run again."""
    if policy.word == "none":
        return (0.0,) * model.layers
    whole = block_costs(model, sequence_length).times
    products = block_costs(model, 0).times  # without scores, which need keys
    parts = zip(whole, products, strict=True)
    return tuple(
        (0.0 if policy.keeps("matmul") else product / 3)
        + (0.0 if policy.keeps("attention") else (both - product) / 3)
        for both, product in parts
    )


def check_number_of_stages(blocks: int, stages: int) -> None:
    """Raises LayoutError unless each stage can have a block."""
    if not 1 <= stages <= blocks:
        raise LayoutError(
            f"{stages} stages cannot share {blocks} blocks",
            where="layout.pp",
            remedy=f"use {max(1, blocks)} or less",
        )


def best_split(blocks: int, stages: int, first: StageCost, second: StageCost) -> Stages:
    """The best contiguous split, by dynamic programming over (stages, blocks given out).

    Three passes: the least possible first cost of the stage that has the most of it. Under it, the
    least second cost of the stage with most of that. Under both, the smallest first stages.
    O(stages * blocks * log(blocks)).
    """
    # sums may differ in the end
    most = _least_bottlenecks(blocks, stages, first)[0][0] * (1 + 1e-12)

    def allowed(stage: int, start: int, stop: int) -> float:
        fits = first(stage, start, stop) <= most
        return second(stage, start, stop) if fits else float("inf")

    rest = _least_bottlenecks(blocks, stages, allowed)
    largest, out, start = rest[0][0], [], 0
    for stage in range(stages):
        stop = next(
            stop
            for stop in range(start + 1, blocks + 1)
            if max(allowed(stage, start, stop), rest[stage + 1][stop]) <= largest
        )
        out.append(stop - start)
        start = stop
    return tuple(out)


def _least_bottlenecks(blocks: int, stages: int, cost: StageCost) -> Sequence[Sequence[float]]:
    """[stage][start]: the least possible largest cost of stages `stage` and after, when they hold
    the blocks from `start` on; infinite where they cannot."""
    infinite = float("inf")
    rest = [[infinite] * (blocks + 1) for _ in range(stages + 1)]
    rest[stages][blocks] = 0.0
    for stage in reversed(range(stages)):
        after, later = rest[stage + 1], stages - stage - 1  # each other stage has a block
        for start in range(stage, blocks - later):
            # with more blocks the stage costs no less, and those after it cost no more
            low, high = start + 1, blocks - later
            while low < high:
                middle = (low + high) // 2
                if cost(stage, start, middle) >= after[middle]:
                    high = middle
                else:
                    low = middle + 1
            best = max(cost(stage, start, low), after[low])
            if low > start + 1:
                best = min(best, after[low - 1])
            rest[stage][start] = best
    return rest

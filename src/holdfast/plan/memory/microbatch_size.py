"""The largest microbatch that fits a device, by the estimate of `estimate.py`: nothing is tried.

A microbatch must divide every batch of the run, and the numbers of shards must divide it. Every
replica must get its share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, lcm

from holdfast.config.run import RunConfig
from holdfast.errors import LayoutError
from holdfast.layout import place_replicas
from holdfast.plan.memory.estimate import estimates_by_rank
from holdfast.plan.placing.layouts import layouts_of


@dataclass(frozen=True)
class MicrobatchChoice:
    """A size that a run can have."""

    size: int  # samples
    peak: int  # bytes of the rank that needs most


def choose_microbatch_size(
    config: RunConfig, limit: int
) -> tuple[MicrobatchChoice | None, MicrobatchChoice]:
    """(the largest microbatch of which no rank needs more than `limit` bytes, or None; the one that
    needs least). Raises LayoutError if no size gives every replica its share."""
    least: MicrobatchChoice | None = None
    for choice in microbatch_choices(config):
        if choice.peak <= limit:
            return choice, choice
        least = choice if least is None or choice.peak < least.peak else least
    if least is None:
        step, size = _step(config), config.train.batch_size
        layouts_of(with_size(config, step))  # says what is wrong, unless it is this:
        raise LayoutError(
            f"a step of {size} samples has no microbatch that {step} shards can share",
            where="train.batch_size",
            remedy=f"use {-(-size // step) * step}",
        )
    return None, least


def microbatch_choices(config: RunConfig) -> Iterator[MicrobatchChoice]:
    """The sizes that this run can have, the largest first."""
    train = config.train
    whole = gcd(train.batch_size, *(stage.batch_size for stage in train.batch_warmup))
    step = _step(config)
    for size in range(whole - whole % step, 0, -step):
        if whole % size:
            continue
        sized = with_size(config, size)
        try:
            layouts = layouts_of(sized)
        except LayoutError:
            continue  # larger microbatches are fewer
        world = sum(layout.world_size for layout in layouts)
        topology = place_replicas(layouts, 1, ("node",) * world)
        peak = max(estimate.peak for estimate in estimates_by_rank(sized, topology))
        yield MicrobatchChoice(size, peak)


def with_size(config: RunConfig, size: int) -> RunConfig:
    """The same run with another microbatch."""
    train = config.train.model_copy(update={"microbatch_size": size})
    return config.model_copy(update={"train": train})


def _step(config: RunConfig) -> int:
    """Samples of which each microbatch is a multiple."""
    layout = config.layout
    return lcm(layout.dp_shard, *(replica.dp_shard for replica in layout.replicas))

"""Ledger entries of positions of a run, rebuilt from its data."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from math import gcd
from typing import Any, Protocol

from holdfast.core.data.data_ledger import STAND_IN_KEY, Range
from holdfast.core.data.sample_order import BatchSchedule


class ReadMicrobatch(Protocol):
    @property
    def entries(self) -> list[dict[str, Any]]: ...


class BatchesOfSteps(Protocol):
    """Every batch of a run; `data.batch.Batches` is one."""

    microbatch_size: int
    schedule: BatchSchedule

    def microbatch(
        self, step: int, index: int, part: int = 0, parts: int = 1
    ) -> ReadMicrobatch: ...


def stand_in_entries(
    batches: BatchesOfSteps, missing: Sequence[Range], last_step: int
) -> list[tuple[int, list[dict[str, Any]]]]:
    """Return (step, entries) for these positions, up to `last_step`; reads the data. Each entry is
    marked as a stand-in."""
    position = batches.schedule.position
    out: list[tuple[int, list[dict[str, Any]]]] = []
    oldest = bisect_right(range(1, last_step + 1), missing[0][0], key=position)
    for step in range(max(1, oldest), last_step + 1):
        first, last = position(step), position(step + 1)
        parts = [(max(low, first), min(high, last)) for low, high in missing]
        entries = [
            {**entry, STAND_IN_KEY: True}
            for low, high in parts
            if low < high
            for entry in _microbatch_entries(batches, step, low - first, high - first)
        ]
        if entries:
            out.append((step, entries))
    return out


def _microbatch_entries(
    batches: BatchesOfSteps, step: int, start: int, stop: int
) -> Iterator[dict[str, Any]]:
    """Yield entries for samples [start, stop) of a step, by microbatch.

    The shares of a microbatch are cut as `dp_shard` may cut them."""
    size = batches.microbatch_size
    while start < stop:
        index, offset = divmod(start, size)
        share = gcd(size, min(stop - start, size - offset), offset)
        yield from batches.microbatch(step, index, offset // share, size // share).entries
        start += share

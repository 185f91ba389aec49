"""The global sample order as arithmetic: the sample at each position.

Three maps follow each other, each a pure function of the run file and the dataset:

    step      -> positions   BatchSchedule   the batch may be warmed up
    position  -> source      Mixture         weights as a repeating pattern; each change of the
                                             weights begins another one
    ordinal   -> sample      SampleOrder     a keyed permutation per source and epoch

A *position* counts samples of the run from 0; an *ordinal* counts those of one source. Nothing here
knows a rank, a world size or a generation.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from holdfast.config.sections.data import MAX_EXACT_BLOCK, whole_weights
from holdfast.core.data.permutation import LocalPermutation, Permutation
from holdfast.core.seeds import key_seed
from holdfast.errors import ConfigError, DataError

MAX_MIXTURE_BLOCK = 10_000
NEVER = 1 << 62
"""A position that no run reaches."""


class BatchSchedule:
    """The global batch size of each step, and how many samples came before it.

    `batch_size` counts from step 1; each stage (from_step, batch_size) replaces it from its
    step on. Stages rise. Steps are numbered from 1.
    """

    def __init__(self, batch_size: int, stages: Sequence[tuple[int, int]] = ()):
        self._starts = [1]
        self._sizes = [batch_size]
        self._before = [0]
        for from_step, size in stages:
            if from_step == 1 and len(self._starts) == 1:
                self._sizes[0] = size
                continue
            if from_step <= self._starts[-1]:
                raise ConfigError(
                    "from_step must rise from stage to stage", where="train.batch_warmup"
                )
            run = (from_step - self._starts[-1]) * self._sizes[-1]
            self._before.append(self._before[-1] + run)
            self._starts.append(from_step)
            self._sizes.append(size)

    def _stage(self, step: int) -> int:
        if step < 1:
            raise ValueError(f"step {step}: steps are numbered from 1")
        return bisect_right(self._starts, step) - 1

    def size(self, step: int) -> int:
        """Samples of step `step`."""
        return self._sizes[self._stage(step)]

    def position(self, step: int) -> int:
        """Samples of all steps before `step`: where its batch begins in the global order."""
        stage = self._stage(step)
        return self._before[stage] + (step - self._starts[stage]) * self._sizes[stage]

    def share(
        self, microbatch_size: int, step: int, index: int, part: int, parts: int
    ) -> tuple[int, int]:
        """Return positions [start, stop) of part `part` of `parts` of microbatch `index` (from 0)
        of a step. Raises IndexError and ConfigError."""
        if not 0 <= index < self.size(step) // microbatch_size:
            raise IndexError(f"step {step} has no microbatch {index}")
        if microbatch_size % parts:
            raise ConfigError(
                f"layout.dp_shard {parts} does not divide train.microbatch_size {microbatch_size}"
            )
        size = microbatch_size // parts
        start = self.position(step) + index * microbatch_size + part * size
        return start, start + size


class Mixture:
    """Weights as a repeating pattern of sources.

    A block of `block` positions holds each source an integer number of times, spread evenly. So the
    count of a source before any position is one division and one look-up. The block is the shortest
    that meets every weight within one part in a million, with MAX_BLOCK positions at most. Raises
    ConfigError for a share below 1 / MAX_BLOCK.
    """

    def __init__(self, weights: Sequence[float]):
        total = float(sum(weights))
        shares = [w / total for w in weights]
        if min(shares) < 1 / MAX_MIXTURE_BLOCK:
            raise ConfigError(
                f"the weight {min(weights)} is less than a ten-thousandth of all weights",
                where="data.sources",
                remedy="raise it, or leave the source out",
            )
        counts = _smallest_counts(shares)
        # Places of each source in a block: its k-th sample as near as can be to (k + 1/2) / count.
        source = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        due = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        self._index(counts, source[np.lexsort((source, due))])

    @classmethod
    def exact(cls, weights: Sequence[float], where: str) -> Mixture:
        """A mixture of just these weights, of which some may be 0. At each position the count of
        a source differs from its share by less than one. Raises ConfigError for weights whose
        block would have more than MAX_EXACT_BLOCK positions, or that are all 0."""
        counts = whole_weights(weights)
        if not 0 < sum(counts) <= MAX_EXACT_BLOCK:
            what = "are all 0" if not sum(counts) else "have too many digits"
            raise ConfigError(
                f"the weights {', '.join(f'{weight:g}' for weight in weights)} {what}",
                where=where,
                remedy=f"use whole numbers with a sum of at most {MAX_EXACT_BLOCK}, one above 0",
            )
        mixture = cls.__new__(cls)
        mixture._index(counts, _chairman_pattern(counts))
        return mixture

    def _index(self, counts: list[int], pattern: NDArray[np.int64]) -> None:
        self.counts, self.block, self._pattern = counts, sum(counts), pattern
        hits = self._pattern[None, :] == np.arange(len(self.counts))[:, None]
        # _before[i, k]: how often source i stands in the first k places of the block
        self._before = np.zeros((len(self.counts), self.block + 1), dtype=np.int64)
        np.cumsum(hits, axis=1, out=self._before[:, 1:])

    def assign(self, position: int) -> tuple[int, int]:
        """(source, ordinal within the source) of one position."""
        block, place = divmod(position, self.block)
        source = int(self._pattern[place])
        return source, block * self.counts[source] + int(self._before[source, place])

    def assign_many(
        self, positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """`assign` for many positions [n] -> sources [n], ordinals [n]."""
        block, place = np.divmod(positions, self.block)
        source = self._pattern[place]
        return source, block * np.asarray(self.counts)[source] + self._before[source, place]

    def count_before(self, source: int, position: int) -> int:
        """Return how many positions in [0, position) belong to `source`."""
        block, place = divmod(position, self.block)
        return block * self.counts[source] + int(self._before[source, place])

    def position_of(self, source: int, ordinal: int) -> int:
        """Return the position of a source's sample `ordinal`; NEVER if its weight is 0."""
        if not self.counts[source]:
            return NEVER
        block, rest = divmod(ordinal, self.counts[source])
        place = int(np.searchsorted(self._before[source], rest + 1)) - 1
        return block * self.block + place


def _chairman_pattern(counts: Sequence[int]) -> NDArray[np.int64]:
    """A block in which no source is ever a full place away from its share.

    Of the samples that are not too early, the one with the earliest deadline comes next (Tijdeman,
    The chairman assignment problem, 1980)."""
    block = sum(counts)
    active = [source for source, count in enumerate(counts) if count]
    step = max(1, 2 * len(active) - 2)

    def first_place(source: int, number: int) -> int:
        """Sample `number` of a source is too early before this place."""
        return -(-block * (step * number + 1) // (step * counts[source])) - 1

    early = [(first_place(source, 0), source, 0) for source in active]
    heapq.heapify(early)
    ready: list[tuple[int, int, int]] = []
    each = {source: lcm(*(counts[a] for a in active)) // counts[source] for source in active}
    pattern = np.empty(block, dtype=np.int64)
    for place in range(block):
        while early and early[0][0] <= place:
            _, source, number = heapq.heappop(early)
            deadline = (step * (number + 1) - 1) * each[source]
            heapq.heappush(ready, (deadline, source, number))
        _, source, number = heapq.heappop(ready)
        pattern[place] = source
        if number + 1 < counts[source]:
            heapq.heappush(early, (first_place(source, number + 1), source, number + 1))
    return pattern


def _smallest_counts(shares: Sequence[float]) -> list[int]:
    """The smallest integer counts whose proportions are the shares (within 1e-6 of each)."""
    for block in range(len(shares), MAX_MIXTURE_BLOCK):
        counts = [round(share * block) for share in shares]
        if sum(counts) == block and all(
            abs(count - share * block) <= 1e-6 * share * block
            for count, share in zip(counts, shares, strict=True)
        ):
            return counts
    # Largest remainder; the guard in Mixture makes every floor at least 1.
    scaled = [share * MAX_MIXTURE_BLOCK for share in shares]
    counts = [max(1, int(value)) for value in scaled]
    rest = sorted(range(len(shares)), key=lambda i: (counts[i] - scaled[i], i))
    for i in rest[: MAX_MIXTURE_BLOCK - sum(counts)]:
        counts[i] += 1
    return counts


@dataclass(frozen=True)
class SamplePlace:
    """The target of one position: sample `sample` of `source`, in its pass `epoch` (from 0)."""

    source: int
    epoch: int
    sample: int


@dataclass(frozen=True)
class MixChange:
    """From position `start` on, these weights. where: the key of the run file that says so."""

    start: int
    weights: tuple[float, ...]
    where: str = "data.mix"


@dataclass(frozen=True)
class SourceEnd:
    """What happens after `samples` samples of a source: its share goes to the other sources, or
    the run stops before it needs another one."""

    samples: int
    then: Literal["leave", "stop"]


@dataclass(frozen=True)
class OrderedPasses:
    """The first `passes` passes over a source read its samples from the first to the last. They are
    shuffled only within `window` in a row."""

    passes: int
    window: int = 1


@dataclass(frozen=True)
class MixPart:
    """Positions [start, next part) with one mixture. before[s]: samples of source s in all earlier
    parts. ended: the source whose end began this part."""

    start: int
    mixture: Mixture
    before: tuple[int, ...]
    ended: int | None = None


class SampleOrder:
    """position -> (source, epoch, sample) for sources of `sizes` samples.

    Every epoch of a source is its own permutation, keyed by (seed, source, epoch). An epoch holds
    each sample exactly once, and no epoch repeats the order of another, unless `ordered` says so.

    changes: other weights from a position on; positions rise. ends: of each source, or None for one
    that is repeated without end. What a change or an end does begins at its position, so none of
    them moves a sample before it. `length`: positions that there are, NEVER if no end stops the
    run. `stopped_by`: the source that does.
    """

    def __init__(
        self,
        seed: int,
        sizes: Sequence[int],
        weights: Sequence[float],
        changes: Sequence[MixChange] = (),
        ends: Sequence[SourceEnd | None] = (),
        ordered: OrderedPasses | None = None,
    ):
        if len(sizes) != len(weights) or min(sizes) < 1:
            raise ValueError(f"sizes {list(sizes)} and weights {list(weights)} do not fit")
        self.seed, self._ordered = seed, ordered
        self.sizes = tuple(sizes)
        self.length, self.stopped_by = NEVER, 0
        self._ends = tuple(ends) or (None,) * len(sizes)
        self.parts: list[MixPart] = []
        begun = [MixChange(0, tuple(weights), "data.sources"), *changes]
        starts = [change.start for change in changes] + [NEVER]
        for number, (change, stop) in enumerate(zip(begun, starts, strict=True)):
            if change.start < stop:
                self._add_parts(change, stop, is_first=number == 0)
        self._starts = [part.start for part in self.parts]

    def _add_parts(self, change: MixChange, stop: int, *, is_first: bool) -> None:
        """The parts of positions [change.start, stop), one more for each source that leaves."""
        start, ended = change.start, None
        weights = [0.0 if self._is_over(s, start) else w for s, w in enumerate(change.weights)]
        while start < min(stop, self.length):
            if not any(weights) and any(change.weights):
                self.length = start
                self.stopped_by = change.weights.index(max(change.weights))
                return
            is_plain = is_first and ended is None
            mixture = Mixture(weights) if is_plain else Mixture.exact(weights, change.where)
            before = tuple(self.count_before(s, start) for s in range(len(self.sizes)))
            self.parts.append(MixPart(start, mixture, before, ended))
            rest = [
                (source, end.then, end.samples - before[source])
                for source, end in enumerate(self._ends)
                if end is not None and weights[source]
            ]
            next_at = {
                s: start + mixture.position_of(s, n) for s, then, n in rest if then == "stop"
            }
            last_at = [
                (start + mixture.position_of(s, n - 1), s) for s, then, n in rest if then == "leave"
            ]
            last, ended = min(last_at, default=(stop, None))
            for source, at in next_at.items():
                if at < min(last + 1, stop, self.length):
                    self.length, self.stopped_by = at, source
            if ended is None:
                return
            start, weights[ended] = last + 1, 0.0

    def _is_over(self, source: int, position: int) -> bool:
        end = self._ends[source]
        return (
            end is not None
            and end.then == "leave"
            and self.count_before(source, position) >= end.samples
        )

    def count_before(self, source: int, position: int) -> int:
        """Return how many positions in [0, position) belong to `source`."""
        for part in reversed(self.parts):
            if part.start <= position:
                within = part.mixture.count_before(source, position - part.start)
                return part.before[source] + within
        return 0

    def permutation(self, source: int, epoch: int) -> Permutation | LocalPermutation:
        size, key = self.sizes[source], key_seed(self.seed, "order", source, epoch)
        if self._ordered is not None and epoch < self._ordered.passes:
            return LocalPermutation(size, key, self._ordered.window)
        return Permutation(size, key)

    def place(self, position: int) -> SamplePlace:
        source, epoch, sample = (int(each[0]) for each in self.places(position, position + 1))
        return SamplePlace(source, epoch, sample)

    def _assign(self, start: int, stop: int) -> Iterator[tuple[NDArray[np.int64], ...]]:
        """Sources and ordinals of the positions [start, stop), part by part."""
        at = bisect_right(self._starts, start) - 1
        while start < stop:
            part = self.parts[at]
            end = self._starts[at + 1] if at + 1 < len(self.parts) else stop
            positions = np.arange(start - part.start, min(stop, end) - part.start, dtype=np.int64)
            source, ordinal = part.mixture.assign_many(positions)
            yield source, ordinal + np.asarray(part.before, dtype=np.int64)[source]
            start, at = end, at + 1

    def places(
        self, start: int, stop: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Sources, epochs and samples [n] of the positions [start, stop). Raises DataError for a
        position that the sources' ends leave no sample for."""
        if stop > self.length:
            raise DataError(
                f"the sources end at sample {self.length:,} of the run, before sample {stop:,}",
                where="data.sources",
                remedy="ask for an earlier step, or use at_end: repeat",
            )
        empty = np.empty(0, dtype=np.int64)
        pieces = list(self._assign(start, stop)) or [(empty, empty)]
        source, ordinal = (np.concatenate(each) for each in zip(*pieces, strict=True))
        epoch, index = np.divmod(ordinal, np.asarray(self.sizes, dtype=np.int64)[source])
        sample = np.empty_like(index)
        for pair in set(zip(source.tolist(), epoch.tolist(), strict=True)):
            where = (source == pair[0]) & (epoch == pair[1])
            sample[where] = self.permutation(*pair).apply_many(index[where])
        return source, epoch, sample

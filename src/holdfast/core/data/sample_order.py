"""The global sample order as arithmetic: the sample at each position.

Three maps follow each other, each a pure function of the run file and the dataset:

    step      -> positions   BatchSchedule   the batch may be warmed up
    position  -> source      Mixture         weights as a repeating pattern
    ordinal   -> sample      SampleOrder     a keyed permutation per source and epoch

A *position* counts samples of the run from 0; an *ordinal* counts those of one source. Nothing here
knows a rank, a world size or a generation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.core.data.permutation import Permutation
from holdfast.core.seeds import key_seed
from holdfast.errors import ConfigError

MAX_MIXTURE_BLOCK = 10_000


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
        self.counts = _smallest_counts(shares)
        self.block = sum(self.counts)
        counts = self.counts
        # Places of each source in a block: its k-th sample as near as can be to (k + 1/2) / count.
        source = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        due = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        self._pattern = source[np.lexsort((source, due))]
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


class SampleOrder:
    """position -> (source, epoch, sample) for sources of `sizes` samples.

    Every epoch of a source is its own permutation, keyed by (seed, source, epoch). An epoch holds
    each sample exactly once, and no epoch repeats the order of another.
    """

    def __init__(self, seed: int, sizes: Sequence[int], weights: Sequence[float]):
        if len(sizes) != len(weights) or min(sizes) < 1:
            raise ValueError(f"sizes {list(sizes)} and weights {list(weights)} do not fit")
        self.seed = seed
        self.sizes = tuple(sizes)
        self.mixture = Mixture(weights)

    def permutation(self, source: int, epoch: int) -> Permutation:
        return Permutation(self.sizes[source], key_seed(self.seed, "order", source, epoch))

    def place(self, position: int) -> SamplePlace:
        source, ordinal = self.mixture.assign(position)
        epoch, index = divmod(ordinal, self.sizes[source])
        return SamplePlace(source, epoch, self.permutation(source, epoch)(index))

    def places(
        self, start: int, stop: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Sources, epochs and samples [n] of the positions [start, stop)."""
        positions = np.arange(start, stop, dtype=np.int64)
        source, ordinal = self.mixture.assign_many(positions)
        epoch, index = np.divmod(ordinal, np.asarray(self.sizes, dtype=np.int64)[source])
        sample = np.empty_like(index)
        for pair in set(zip(source.tolist(), epoch.tolist(), strict=True)):
            where = (source == pair[0]) & (epoch == pair[1])
            sample[where] = self.permutation(*pair).apply_many(index[where])
        return source, epoch, sample

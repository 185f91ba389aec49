"""The join of `near_duplicates`: which documents are nearly equal to another one that stays.

Documents with the same values in a band of their signatures are compared, band by band. In a group
of such documents the one with the lowest rank stays, and those that are alike to it are left out.
Then the next one of the rest stays, and so on. The rank is a hash of the content. So the survivors
do not depend on the order of files, sources or units, nor on the processes that made signatures.

A document is compared only with documents that still stay. The removal list names that document
and the estimate. It may be left out for a third one later: the list is then followed further.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from holdfast.data.filters.shingles import BANDS, band_keys, mix, similarity

MAPPED_UNITS = 128
"""Units whose signatures stay mapped while groups are compared."""
PART_BITS = 14
"""About 2 ** PART_BITS documents are sorted at a time."""
Rows = NDArray[np.uint64]
"""[documents, 3]: two halves of a document's hash, and its bytes."""


@dataclass(frozen=True)
class NearDuplicates:
    """What is left out, one entry a document: (unit, place), what it repeats, and the estimate."""

    unit: NDArray[np.int32]
    place: NDArray[np.int32]
    repeated_unit: NDArray[np.int32]
    repeated_place: NDArray[np.int32]
    similarity: NDArray[np.float32]

    def in_unit(self, unit: int) -> dict[int, tuple[int, int, float]]:
        """Return place -> (unit and place of what it repeats, estimate), of one unit."""
        return {
            int(self.place[i]): (
                int(self.repeated_unit[i]),
                int(self.repeated_place[i]),
                float(self.similarity[i]),
            )
            for i in np.flatnonzero(self.unit == unit)
        }


def rank(rows: Rows) -> NDArray[np.uint64]:
    """Return a number of each document that its content decides: uint64 [documents]. The split and
    the tokenizer's sample go by the halves of the hash themselves, so the rank is another one."""
    return mix(rows[:, 0] + mix(rows[:, 1]))


def find_near_duplicates(
    rows: Sequence[Rows],
    kept: Sequence[NDArray[np.bool_]],
    signatures: Sequence[NDArray[np.uint16]],
    groups: Sequence[int],
    limit: float,
) -> NearDuplicates:
    """Find the documents that are alike to another one of the same group.

    Args:
        rows: the documents of each unit.
        kept: per unit the documents that take part, a mask [documents].
        signatures: per unit those of the documents that take part, or more: [documents, HASHES].
        groups: a number per unit. Documents of other groups are not compared.
        limit: documents with this estimate or a higher one are alike.
    """
    order, unit, place = _by_rank(rows, kept)
    alive = np.ones(len(order), dtype=bool)
    cause = np.full(len(order), -1, dtype=np.int32)
    estimate = np.zeros(len(order), dtype=np.float32)  # shares of HASHES, so they are exact
    keys = np.empty(len(order), dtype=np.uint64)
    salts = mix(np.asarray(groups, dtype=np.uint64))
    table_of = lru_cache(maxsize=MAPPED_UNITS)(signatures.__getitem__)

    def signatures_of(documents: NDArray[np.int64]) -> NDArray[np.uint16]:
        return np.stack([table_of(int(unit[i]))[place[i]] for i in documents])

    for band in range(BANDS):
        at = 0
        for number, mask in enumerate(kept):
            values = band_keys(signatures[number][mask], band) if mask.any() else keys[:0]
            keys[at : at + len(values)] = mix(values ^ salts[number])
            at += len(values)
        for members in _groups(keys, order, alive):
            rest, table = members, signatures_of(members)
            while len(rest) > 1:
                found = similarity(table[0], table[1:])
                alike = found >= limit
                gone = rest[1:][alike]
                alive[gone], cause[gone], estimate[gone] = False, rest[0], found[alike]
                rest, table = rest[1:][~alike], table[1:][~alike]
    out = np.flatnonzero(~alive)
    return NearDuplicates(unit[out], place[out], unit[cause[out]], place[cause[out]], estimate[out])


def _by_rank(
    rows: Sequence[Rows], kept: Sequence[NDArray[np.bool_]]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Return the documents that take part, the lowest rank first: their numbers in the order of
    units, their units, and their places. Of equal documents the first in that order is first."""
    counts = [int(mask.sum()) for mask in kept]
    ranks = np.empty(sum(counts), dtype=np.uint64)
    place = np.empty(len(ranks), dtype=np.int32)
    at = 0
    for number, (count, mask) in enumerate(zip(counts, kept, strict=True)):
        if count:
            ranks[at : at + count] = rank(rows[number][mask])
            place[at : at + count] = np.flatnonzero(mask)
        at += count
    order = np.argsort(ranks, kind="stable").astype(np.int32)
    del ranks
    unit = np.repeat(np.arange(len(kept), dtype=np.int32), counts)
    return order, unit[order], place[order]


def _groups(
    keys: NDArray[np.uint64], order: NDArray[np.int32], alive: NDArray[np.bool_]
) -> Iterator[NDArray[np.int64]]:
    """Yield the living documents with the same key, each group by rank, without groups of one. A
    part of the keys is sorted at a time, so that memory hardly grows with the documents."""
    parts = max(1, min(256, len(keys) >> PART_BITS))
    part_of = ((keys >> np.uint64(48)) % np.uint64(parts)).astype(np.uint8)[order]
    for part in range(parts):
        members = np.flatnonzero((part_of == part) & alive)
        found = keys[order[members]]
        sort = np.argsort(found, kind="stable")
        cuts = np.flatnonzero(np.diff(found[sort])) + 1
        members = members[sort]
        for a, b in zip([0, *cuts], [*cuts, len(members)], strict=True):
            if b - a > 1:
                yield members[a:b]

"""The join of `near_duplicates`: which documents are nearly equal to another one that stays.

Documents with the same values in a band of their signatures are compared, band by band. In a group
of such documents the one with the lowest rank stays, and those that are alike to it are left out.
Then the next one of the rest stays, and so on. The rank is a hash of the content. So the survivors
do not depend on the order of files, sources or units, nor on the processes that made signatures.

A document is compared only with documents that still stay. The removal list names that document
and the estimate. It may be left out for a third one later: the list is then followed further.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.data.filters.shingles import BANDS, band_keys, mix, similarity

Rows = NDArray[np.uint64]
"""[documents, 3]: two halves of a document's hash, and its bytes."""


@dataclass(frozen=True)
class NearDuplicates:
    """What is left out, one entry a document: (unit, place), what it repeats, and the estimate."""

    unit: NDArray[np.int64]
    place: NDArray[np.int64]
    repeated_unit: NDArray[np.int64]
    repeated_place: NDArray[np.int64]
    similarity: NDArray[np.float64]

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
    places = [np.flatnonzero(mask) for mask in kept]
    unit = np.repeat(np.arange(len(rows)), [len(p) for p in places])
    place = np.concatenate([*places, np.zeros(0, dtype=np.int64)]).astype(np.int64)
    ranks = np.concatenate(
        [np.zeros(0, np.uint64), *(rank(r[p]) for r, p in zip(rows, places, strict=True))]
    )
    group = np.asarray(groups, dtype=np.uint64)[unit] if len(unit) else ranks
    alive = np.ones(len(unit), dtype=bool)
    cause = np.full(len(unit), -1, dtype=np.int64)
    estimate = np.zeros(len(unit))
    order = np.lexsort((place, unit, ranks))  # equal documents: the first stays
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))

    def signatures_of(documents: NDArray[np.int64]) -> NDArray[np.uint16]:
        return np.stack([signatures[unit[i]][place[i]] for i in documents])

    for band in range(BANDS):
        keys = np.concatenate(
            [
                np.zeros(0, np.uint64),
                *(band_keys(s[p], band) for s, p in zip(signatures, places, strict=True)),
            ]
        )
        for members in _groups(mix(keys ^ mix(group)), alive, position):
            rest, table = members, signatures_of(members)
            while len(rest) > 1:
                found = similarity(table[0], table[1:])
                alike = found >= limit
                gone = rest[1:][alike]
                alive[gone], cause[gone], estimate[gone] = False, rest[0], found[alike]
                rest, table = rest[1:][~alike], table[1:][~alike]
    out = np.flatnonzero(~alive)
    return NearDuplicates(unit[out], place[out], unit[cause[out]], place[cause[out]], estimate[out])


def _groups(
    keys: NDArray[np.uint64], alive: NDArray[np.bool_], position: NDArray[np.int64]
) -> list[NDArray[np.int64]]:
    """Return the documents with the same key, each group by rank, without groups of one."""
    living = np.flatnonzero(alive)
    order = living[np.lexsort((position[living], keys[living]))]
    cuts = np.flatnonzero(np.diff(keys[order])) + 1
    starts, stops = np.append(0, cuts), np.append(cuts, len(order))
    return [order[a:b] for a, b in zip(starts, stops, strict=True) if b - a > 1]

"""Selects the documents that stay, their splits, and those that the tokenizer is trained on.

All three follow from the documents' hashes and their order in the sources. So they do not depend on
the processes that computed the hashes. Memory is bounded by working through the hashes in
partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from holdfast.data.stages.unit_tasks import DROP, TRAIN, VALIDATION
from holdfast.errors import DataError

PARTITION_DOCUMENTS, MAX_PARTITIONS = 1 << 15, 128
"""Documents whose hashes are compared at a time. A corpus of more than the product of both has
larger partitions: each partition reads all hashes."""

# [documents, 3]: hash high, hash low, bytes (0: an empty document)
DocumentRows = NDArray[np.uint64]

LeaveOut = Callable[[Sequence[NDArray[np.bool_]], Sequence[int]], list[NDArray[np.bool_]]]
"""(documents that stay, source) per unit -> which of them do not stay after all."""

Scope = bool | Literal["within_source"]
"""`data.deduplicate`: True compares the documents of all sources."""


@dataclass(frozen=True)
class SourceCount:
    """What became of one source's documents. own_duplicates: those that repeat a document of the
    same source. The rest of the duplicates repeat one of another source."""

    documents: int
    empty: int
    duplicates: int
    own_duplicates: int = 0
    removed: int | None = None  # by stages; None without stages

    def to_json(self) -> dict[str, int]:
        """Return what the manifest keeps."""
        found = {"documents": self.documents, "empty": self.empty, "duplicates": self.duplicates}
        return found if self.removed is None else {**found, "removed": self.removed}

    def causes(self) -> list[str]:
        """Return what was left out, each with its cause."""
        across = self.duplicates - self.own_duplicates
        return [
            f"{number:,} {cause}"
            for number, cause in (
                (self.empty, "empty"),
                (self.removed or 0, "by data.stages"),
                (self.own_duplicates, "repeat an earlier document"),
                (across, "repeat a document of an earlier source"),
            )
            if number
        ]


def describe_count(count: SourceCount, scope: Scope) -> str:
    """Documents of a source that stay, and why the rest does not."""
    left = count.documents - count.empty - count.duplicates - (count.removed or 0)
    causes = count.causes()
    if not causes:
        return f"{left:,} documents"
    why = f"; data.deduplicate: {str(scope).lower()}" if count.duplicates else ""
    return f"{left:,} documents (left out: {', '.join(causes)}{why})"


@dataclass(frozen=True)
class DocumentChoice:
    """`lots[u]` uint8 [documents of unit u]: drop, train or validation. Counts per source."""

    lots: list[NDArray[np.uint8]]
    counts: list[SourceCount]


def choose_documents(
    rows: Sequence[DocumentRows],
    sources: Sequence[int],
    names: Sequence[str],
    validation_fraction: float,
    scope: Scope = True,
    removed: Sequence[NDArray[np.bool_]] = (),
    leave_out: LeaveOut | None = None,
) -> DocumentChoice:
    """Keep the first of equal documents in `scope`, and split the kept ones by their hash.

    A document is validation if its hash, read as a fraction of all hashes, is below
    `validation_fraction`. So it stays in its split when the corpus grows. If a split would be
    empty, the document with the lowest (highest) hash goes there, so that a small corpus has both.
    `rows` and `sources` are per unit. removed: per unit the documents that a stage left out, whose
    rows are empty. leave_out: says which of the kept documents a stage leaves out.
    Raises DataError for a source of which nothing is left.
    """
    lots = [np.zeros(len(r), dtype=np.uint8) for r in rows]
    if scope is False:
        for unit, table in enumerate(rows):
            lots[unit][table[:, 2] > 0] = TRAIN
    else:
        groups = sources if scope == "within_source" else [0] * len(rows)
        for unit, place in _first_of_equals(rows, groups):
            lots[unit][place] = TRAIN
    gone = list(removed)
    if leave_out is not None:
        for unit, mask in enumerate(leave_out([lot == TRAIN for lot in lots], sources)):
            lots[unit][mask] = DROP
            gone[unit] = gone[unit] | mask
    own = _own_duplicates(rows, sources, len(names)) if scope is True else None
    bound = np.uint64(min(int(validation_fraction * 2.0**64), 2**64 - 1))
    for unit, table in enumerate(rows):
        lots[unit][(lots[unit] == TRAIN) & (table[:, 0] < bound)] = VALIDATION
    counts = [_count(rows, lots, sources, i, own, gone) for i in range(len(names))]
    for i, name in enumerate(names):
        _require_documents(counts[i], name)
        _fill_training(rows, lots, [u for u, s in enumerate(sources) if s == i])
    if validation_fraction > 0:
        _fill_validation(rows, lots, sources)
    return DocumentChoice(lots, counts)


def _own_duplicates(rows: Sequence[DocumentRows], sources: Sequence[int], count: int) -> list[int]:
    """Per source the documents that repeat an earlier one of the same source."""
    kept = [0] * count
    for unit, place in _first_of_equals(rows, sources):
        kept[sources[unit]] += len(place)
    full = [0] * count
    for unit, table in enumerate(rows):
        full[sources[unit]] += int((table[:, 2] > 0).sum())
    return [full[i] - kept[i] for i in range(count)]


def _first_of_equals(
    rows: Sequence[DocumentRows], groups: Sequence[int]
) -> list[tuple[int, NDArray[np.intp]]]:
    """Per unit the places of documents that are not empty and equal none before them in the units
    of the same group."""
    of_unit = np.asarray(groups, dtype=np.int64)
    total = sum(len(r) for r in rows)
    partitions = np.uint64(min(MAX_PARTITIONS, max(1, -(-total // PARTITION_DOCUMENTS))))
    kept: list[tuple[int, NDArray[np.intp]]] = []
    for partition in range(int(partitions)):
        places = [
            np.flatnonzero((r[:, 2] > 0) & (r[:, 1] % partitions == np.uint64(partition)))
            for r in rows
        ]
        units = np.repeat(np.arange(len(rows)), [len(p) for p in places])
        place = np.concatenate(places) if places else np.zeros(0, dtype=np.intp)
        if not len(place):
            continue
        high = np.concatenate([r[p, 0] for r, p in zip(rows, places, strict=True)])
        low = np.concatenate([r[p, 1] for r, p in zip(rows, places, strict=True)])
        group = of_unit[units]
        order = np.lexsort((low, high, group))  # stable: equal ones stay in the documents' order
        first = np.ones(len(order), dtype=bool)
        for key in (high, low, group):
            first[1:] &= np.diff(key[order]) == 0
        first[1:] = ~first[1:]
        chosen = np.sort(order[first])
        cuts = np.searchsorted(units[chosen], np.arange(1, len(rows)))
        kept.extend(enumerate(np.split(place[chosen], cuts)))
    return kept


def _count(
    rows: Sequence[DocumentRows],
    lots: Sequence[NDArray[np.uint8]],
    sources: Sequence[int],
    source: int,
    own: list[int] | None,
    gone: Sequence[NDArray[np.bool_]],
) -> SourceCount:
    mine = [u for u, s in enumerate(sources) if s == source]
    documents = sum(len(rows[u]) for u in mine)
    empty = sum(int((rows[u][:, 2] == 0).sum()) for u in mine)
    kept = sum(int((lots[u] != DROP).sum()) for u in mine)
    removed = sum(int(gone[u].sum()) for u in mine) if gone else None
    empty -= sum(int((gone[u] & (rows[u][:, 2] == 0)).sum()) for u in mine) if gone else 0
    duplicates = documents - empty - kept - (removed or 0)
    own_duplicates = duplicates if own is None else own[source]
    return SourceCount(documents, empty, duplicates, own_duplicates, removed)


def _require_documents(count: SourceCount, name: str) -> None:
    if count.documents > count.empty + count.duplicates + (count.removed or 0):
        return
    causes = ", ".join(count.causes())
    remedy = (
        "name files that hold text; in rows of chats, mend empty replies, or name the roles to "
        "train on in data.chat.train_on"
    )
    if count.removed:
        remedy = "let the rules of data.stages that are named above leave out less"
    elif count.duplicates > count.own_duplicates:
        remedy = (
            "set data.deduplicate: within_source to keep what other sources have too, or leave "
            "the source out"
        )
    raise DataError(
        f"nothing is left of {count.documents:,} documents" + (f": {causes}" if causes else ""),
        where=f"source {name!r}",
        remedy=remedy,
    )


def _fill_training(
    rows: Sequence[DocumentRows], lots: list[NDArray[np.uint8]], units: Sequence[int]
) -> None:
    """Give a source without a training document the one with its highest hash."""
    if any((lots[u] == TRAIN).any() for u in units):
        return
    kept = [(int(rows[u][i, 0]), u, int(i)) for u in units for i in np.flatnonzero(lots[u])]
    _, unit, place = max(kept)
    lots[unit][place] = TRAIN


def _fill_validation(
    rows: Sequence[DocumentRows], lots: list[NDArray[np.uint8]], sources: Sequence[int]
) -> None:
    """Give a corpus without a validation document the one with the lowest hash, from a source
    that can spare it."""
    if any((lot == VALIDATION).any() for lot in lots):
        return
    spare: dict[int, int] = {}
    for unit, source in enumerate(sources):
        spare[source] = spare.get(source, 0) + int((lots[unit] == TRAIN).sum())
    lowest: tuple[int, int, int] | None = None
    for unit, source in enumerate(sources):
        places = np.flatnonzero(lots[unit] == TRAIN)
        if spare[source] > 1 and len(places):
            place = int(places[np.argmin(rows[unit][places, 0])])
            candidate = (int(rows[unit][place, 0]), unit, place)
            lowest = candidate if lowest is None else min(lowest, candidate)
    if lowest is not None:
        lots[lowest[1]][lowest[2]] = VALIDATION


def tokenizer_sample(
    rows: Sequence[DocumentRows], lots: Sequence[NDArray[np.uint8]], sample_bytes: int
) -> list[NDArray[np.bool_]]:
    """Return the training documents of the tokenizer: per unit a mask [documents]. These have the
    lowest second half of their hash (the first decides the split), until they hold `sample_bytes`;
    at least one.
    """
    total = sum(int(r[lot == TRAIN, 2].sum()) for r, lot in zip(rows, lots, strict=True))
    share = min(1.0, 2.0 * sample_bytes / max(total, 1))
    while True:
        bound = 2**64 - 1 if share >= 1.0 else int(share * 2.0**64)
        masks = [
            (lot == TRAIN) & (r[:, 1] <= np.uint64(bound))
            for r, lot in zip(rows, lots, strict=True)
        ]
        low = np.concatenate([r[m, 1] for r, m in zip(rows, masks, strict=True)])
        size = np.concatenate([r[m, 2] for r, m in zip(rows, masks, strict=True)])
        if share >= 1.0 or int(size.sum()) >= sample_bytes:
            break
        share *= 2.0
    order = np.argsort(low, kind="stable")
    enough = int(np.searchsorted(np.cumsum(size[order]), np.uint64(sample_bytes))) + 1
    last = low[order[min(enough, len(order)) - 1]]
    return [m & (r[:, 1] <= last) for r, m in zip(rows, masks, strict=True)]

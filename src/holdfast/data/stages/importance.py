"""The join of `importance`: of all documents those stay that are most like some target texts.

This is DSIR (Xie et al. 2023, arXiv 2302.03169, section 3). A document has the counts z of its
n-grams of words, hashed to buckets. p and q are the shares of each bucket, in the target texts and
in all documents that take part. The importance of a document is p(z) / q(z), in logarithms

    log w = sum over its n-grams of log(p[bucket] + 1e-8) - log(q[bucket] + 1e-8)

The 1e-8 is that of the authors' program. The documents with the highest log w + g stay, with g from
a Gumbel distribution. So they are a sample without replacement in which w is the weight of a
document (Kool, van Hoof and Welling 2019, section 2.3). Here g follows from the hash of the
document, and logarithms are whole numbers of `STEPS_OF_NAT`. So the sample depends neither on the
order of documents, sources and units, nor on the processes that counted n-grams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.data.filters.shingles import mix, word_hashes
from holdfast.data.filters.word_grams import Table, gram_hashes, read_table

STEPS_OF_NAT = 1 << 20
_NO_SHARE = 1e-8
_NOISE = np.uint64(0x6A09E667F3BCC909)  # keeps the noise apart from the split by the same hash
Rows = NDArray[np.uint64]
"""[documents, 3]: two halves of a document's hash, and its bytes."""
Buckets = NDArray[np.uint16]


@dataclass(frozen=True)
class Features:
    """The n-grams of the documents of a unit. ends: one behind the last n-gram of each, int64
    [documents]; buckets: of all n-grams, document by document."""

    ends: NDArray[np.int64]
    buckets: Buckets


@dataclass(frozen=True)
class Selection:
    """Per unit, [documents]: which documents are left out, and log w of each that took part."""

    left_out: list[NDArray[np.bool_]]
    log_weights: list[NDArray[np.float32]]


def features(text: str, gram_words: int, buckets: int) -> Buckets:
    """Return the buckets of a document's n-grams of 1 to `gram_words` words."""
    words = word_hashes(text)
    hashes = [gram_hashes(words, size) % np.uint64(buckets) for size in range(1, gram_words + 1)]
    return np.concatenate(hashes).astype(np.uint16)


def count_target(texts: Iterable[str], gram_words: int, buckets: int) -> Table:
    """Return the table of the target texts: `counts` of their n-grams in the buckets `keys`."""
    counts = np.zeros(buckets, dtype=np.int64)
    for text in texts:
        counts += np.bincount(features(text, gram_words, buckets), minlength=buckets)
    keys = np.flatnonzero(counts)
    return {"keys": keys, "counts": counts[keys]}


def read_target(recipe: dict[str, Any]) -> NDArray[np.int64]:
    """Return the n-grams of the target texts in each bucket. The recipe names the table."""
    keys, counts = read_table(recipe["table"], "keys", "counts")
    target = np.zeros(recipe["buckets"], dtype=np.int64)
    target[keys] = counts
    return target


def select_documents(
    rows: Sequence[Rows],
    kept: Sequence[NDArray[np.bool_]],
    features_of: Sequence[Callable[[], Features]],
    target: NDArray[np.int64],
    share: float,
) -> Selection:
    """Choose the documents that stay.

    Args:
        rows: the documents of each unit.
        kept: per unit the documents that take part, a mask [documents].
        features_of: reads the n-grams of a unit.
        target: n-grams of the target texts in each bucket.
        share: of the documents that take part, those that stay. At least one does.
    """
    chosen = [np.flatnonzero(mask) for mask in kept]
    raw = np.zeros(len(target), dtype=np.int64)
    for mask, read in zip(kept, features_of, strict=True):
        if mask.any():
            one = read()
            within = np.repeat(mask, np.diff(one.ends, prepend=0))
            raw += np.bincount(one.buckets[within], minlength=len(raw))
    ratios = log_ratios(target, raw)
    weights = [np.full(len(mask), np.nan, dtype=np.float32) for mask in kept]
    totals = np.zeros(sum(map(len, chosen)), dtype=np.int64)
    ties = np.zeros(len(totals), dtype=np.uint64)
    at = 0
    for number, places in enumerate(chosen):
        if not len(places):
            continue
        one, hashes = features_of[number](), rows[number][places]
        sums = np.cumsum(ratios[one.buckets], dtype=np.int64)
        sums = np.concatenate([np.zeros(1, np.int64), sums])
        sums = np.diff(sums[one.ends], prepend=0)[places]
        weights[number][places] = sums / STEPS_OF_NAT
        totals[at : at + len(places)] = sums + noise(hashes)
        ties[at : at + len(places)] = hashes[:, 1]
        at += len(places)
    count = min(len(totals), max(1, round(share * len(totals))))
    left_out = np.ones(len(totals), dtype=bool)
    left_out[np.lexsort((ties, -totals))[:count]] = False
    out = [np.zeros(len(mask), dtype=bool) for mask in kept]
    ends = np.cumsum([len(places) for places in chosen])
    for mask, places, gone in zip(out, chosen, np.split(left_out, ends[:-1]), strict=True):
        mask[places] = gone
    return Selection(out, weights)


def log_ratios(target: NDArray[np.int64], raw: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return log(p + 1e-8) - log(q + 1e-8) of each bucket, in `STEPS_OF_NAT`."""
    p, q = (counts / max(int(counts.sum()), 1) for counts in (target, raw))
    return _fixed(np.log(p + _NO_SHARE) - np.log(q + _NO_SHARE))


def noise(rows: Rows) -> NDArray[np.int64]:
    """Return a Gumbel variable of each document, which its hash decides, in `STEPS_OF_NAT`."""
    uniform = (mix(mix(rows[:, 0] + _NOISE) + rows[:, 1]) >> np.uint64(12)) + 0.5
    return _fixed(-np.log(-np.log(uniform / 2.0**52)))


def _fixed(nats: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.rint(nats * STEPS_OF_NAT).astype(np.int64)

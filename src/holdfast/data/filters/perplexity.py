"""The stage `perplexity`: how well an n-gram model of some texts predicts a document.

The model interpolates the orders by Witten and Bell (1991), as Chen and Goodman (1999) write it.

    p(w | h) = (c(h w) + t(h) p(w | h')) / (c(h) + t(h))

Here c counts, and t(h) is how many different words follow h. The history h' is h without its first
word. Below one word each word that was seen, and any other, is as likely. If an n-gram was not
seen, the weight of its history is enough. So a table has two numbers for each n-gram, as the ARPA
format has.

Logarithms are kept in 1/4096 of a bit, as whole numbers. So the sum over a document does not depend
on the order of an addition.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.data.filters.shingles import word_hashes
from holdfast.data.filters.verdict import Stage, Verdict
from holdfast.data.filters.word_grams import Table, find_in, gram_hashes, read_table

STEPS_OF_BIT = 4096
_MERGED = 1 << 20  # n-grams that are collected before they are joined


class KeyCounts:
    """Counts of different keys, of which many come: memory is bounded by the different ones."""

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[Any], NDArray[np.int64]]] = []
        self._pending = 0

    def add(self, keys: NDArray[Any]) -> None:
        self._parts.append((keys, np.ones(len(keys), dtype=np.int64)))
        self._pending += len(keys)
        if self._pending >= max(_MERGED, len(self._parts[0][0])):
            self.result()

    def result(self) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the different keys, sorted, and how often each came."""
        if not self._parts:
            return np.zeros(0, np.uint64), np.zeros(0, np.int64)
        keys, inverse = np.unique(np.concatenate([k for k, _ in self._parts]), return_inverse=True)
        counts = np.concatenate([c for _, c in self._parts])
        # Sums of whole numbers below 2^53 are exact in float64.
        sums = np.bincount(inverse, counts, len(keys)).astype(np.int64)
        self._parts, self._pending = [(keys, sums)], 0
        return keys, sums


def train_model(texts: Iterable[str], order: int) -> Table:
    """Count the n-grams of texts, and return the table of the model.

    `keys` are sorted hashes. `logs` has -log2 of the probability of each, and `backs` -log2 of its
    weight as a history. `unknown` has -log2 of the probability of a word that was not seen: [1].
    """
    counters = [KeyCounts() for _ in range(order)]
    links: list[list[NDArray[np.uint64]]] = [[] for _ in range(order)]
    for text in texts:
        words = word_hashes(text)
        hashes = [gram_hashes(words, n) for n in range(1, min(order, len(words)) + 1)]
        for n, found in enumerate(hashes):
            counters[n].add(found)
            if n:  # (n-gram, its history, its end)
                links[n].append(np.stack([found, hashes[n - 1][:-1], hashes[n - 1][1:]], axis=1))
                if sum(map(len, links[n])) >= _MERGED * 4:
                    links[n] = [_first_rows(links[n])]
    keys, counts = counters[0].result()
    total, types = int(counts.sum()), len(keys)
    uniform = 1.0 / (types + 1)
    probabilities = (counts + types * uniform) / max(total + types, 1)
    unknown = types * uniform / max(total + types, 1) if types else 1.0
    tables = [(keys, probabilities, np.zeros(len(keys)))]
    for n in range(1, order):
        keys, counts = counters[n].result()
        linked = _first_rows(links[n])
        histories, place = np.unique(linked[:, 1], return_inverse=True)
        times = np.bincount(place, counts, len(histories)) if len(place) else np.zeros(0)
        follow = np.bincount(place, minlength=len(histories)).astype(float)
        below_keys, below, backs = tables[-1]
        end = below[find_in(below_keys, linked[:, 2])]
        weight = follow / np.maximum(times + follow, 1)
        probabilities = counts / np.maximum(times + follow, 1)[place] + weight[place] * end
        backs[find_in(below_keys, histories)] = -np.log2(weight)
        tables.append((keys, probabilities, np.zeros(len(keys))))
    keys = np.concatenate([table[0] for table in tables])
    sort = np.argsort(keys, kind="stable")
    logs = -np.log2(np.concatenate([table[1] for table in tables]))
    return {
        "keys": keys[sort],
        "logs": _fixed(logs)[sort],
        "backs": _fixed(np.concatenate([table[2] for table in tables]))[sort],
        "unknown": _fixed(-np.log2(np.array([unknown]))),
    }


def _first_rows(parts: list[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    """Return a row for each value of the first column, sorted by it."""
    rows = np.concatenate([np.zeros((0, 3), np.uint64), *parts])
    return rows[np.unique(rows[:, 0], return_index=True)[1]]


def _fixed(bits: NDArray[np.float64]) -> NDArray[np.int32]:
    return np.rint(bits * STEPS_OF_BIT).astype(np.int32)


def perplexity(text: str, order: int, model: tuple[NDArray[Any], ...]) -> float:
    """Return 2 to the mean of -log2 p of a document's words; 0 of one without a word. model: the
    arrays keys, logs, backs and unknown of its table."""
    keys, logs, backs, unknown = model
    words = word_hashes(text)
    if not len(words):
        return 0.0
    places = find_in(keys, gram_hashes(words, 1))
    bits = np.where(places >= 0, logs[places], unknown[0]).astype(np.int64)
    for n in range(2, min(order, len(words)) + 1):
        history = places[:-1]  # of the n-grams that end one word before
        places = find_in(keys, gram_hashes(words, n))
        known = np.where(places >= 0, logs[places], 0)
        less = bits[n - 1 :] + np.where(history >= 0, backs[history], 0)
        bits[n - 1 :] = np.where(places >= 0, known, less)
    return float(2.0 ** (int(bits.sum()) / STEPS_OF_BIT / len(words)))


def perplexity_stage(recipe: dict[str, Any]) -> Stage:
    """Return the stage `perplexity`. The recipe names the folder of the table."""
    keys, logs, backs, unknown = read_table(recipe["table"], "keys", "logs", "backs", "unknown")
    low, high, order = recipe["min_perplexity"], recipe["max_perplexity"], recipe["order"]

    def judge(text: str) -> Verdict:
        found = perplexity(text, order, (keys, logs, backs, unknown))
        rule = "min_perplexity" if found < low else "max_perplexity" if 0 < high < found else ""
        return Verdict(text, rule, score=found)

    return judge

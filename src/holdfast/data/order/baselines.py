"""Baselines: how well counting alone predicts the validation text. A model must beat it.

Bits per byte (bpb) do not depend on the tokenizer. Every token of the packed stream is a target
except the first of each document, because it has no context. A document's end token is a target. So
a document of n text tokens has n targets, and

    bpb = (mean loss in nats / ln 2) * (text tokens of the split / text bytes of the split)

Training's validation uses the same targets and the same formula.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_TOKENS = 1 << 24  # training tokens counted; beyond that the figures hardly move


def bits_per_byte(nats_per_token: float, tokens_per_byte: float) -> float:
    """Mean loss over targets -> bits per byte of text."""
    return nats_per_token / log(2) * tokens_per_byte


class TokenCounts:
    """Unigram and bigram counts of training streams, ready to price other text.

    Unigrams are smoothed by adding one. Bigrams are interpolated with them after Witten and Bell
    (1991): p(b | a) = (c(a, b) + d(a) p(b)) / (c(a) + d(a)). Here d(a) is the number of distinct
    followers of a.
    """

    def __init__(self, train: Iterable[NDArray[Any]], vocab_size: int, end: int):
        """Count streams [tokens], one per source, MAX_TOKENS in all."""
        self._vocab, self._end = vocab_size, end
        codes, self.tokens = [], 0
        for stream in train:
            tokens = np.asarray(stream[: MAX_TOKENS - self.tokens], dtype=np.int64)
            self.tokens += len(tokens)
            inside = tokens[:-1] != end  # no pair crosses the end of a document
            codes.append(tokens[:-1][inside] * vocab_size + tokens[1:][inside])
        self._pairs, self._counts = np.unique(np.concatenate(codes), return_counts=True)
        first, second = self._pairs // vocab_size, self._pairs % vocab_size
        unigram = np.ones(vocab_size)
        np.add.at(unigram, second, self._counts)
        self._unigram = unigram / unigram.sum()
        self._seen = np.bincount(first, self._counts, vocab_size)
        self._distinct = np.bincount(first, minlength=vocab_size).astype(np.float64)

    def mean_nats(self, before: NDArray[np.int64], after: NDArray[np.int64]) -> tuple[float, float]:
        """Mean loss of targets `after` [n], each following `before` [n]: (unigram, bigram)."""
        wanted = before * self._vocab + after
        at = np.minimum(np.searchsorted(self._pairs, wanted), len(self._pairs) - 1)
        both = np.where(self._pairs[at] == wanted, self._counts[at], 0)
        single = self._unigram[after]
        seen, distinct = self._seen[before], self._distinct[before]
        mixed = (both + distinct * single) / np.where(seen > 0, seen + distinct, 1.0)
        double = np.where(seen > 0, mixed, single)
        return float(-np.log(single).mean()), float(-np.log(double).mean())


def baselines(
    train: Iterable[NDArray[Any]],
    validation: NDArray[Any],
    vocab_size: int,
    end: int,
    tokens_per_byte: float,
) -> dict[str, Any]:
    """Unigram and bigram bits per byte on a validation stream [tokens]; `train`: as Counts."""
    counts = TokenCounts(train, vocab_size, end)
    tokens = np.asarray(validation, dtype=np.int64)
    inside = tokens[:-1] != end
    unigram, bigram = counts.mean_nats(tokens[:-1][inside], tokens[1:][inside])
    return {
        "unigram": bits_per_byte(unigram, tokens_per_byte),
        "bigram": bits_per_byte(bigram, tokens_per_byte),
        "train_tokens": counts.tokens,
        "validation_targets": int(inside.sum()),
    }

"""Baselines: how well counting alone predicts the validation text. A model must beat it.

Bits per byte (bpb) do not depend on the tokenizer. Every token of the packed stream is a target
except the first of each document, because it has no context. A document's end token is a target. So
a document of n text tokens has n targets, and

    bpb = (mean loss in nats / ln 2) * (text tokens of the split / text bytes of the split)

Training's validation uses the same targets and the same formula.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_TOKENS = 1 << 24  # training tokens counted; beyond that the figures hardly move
_PIECE = 1 << 17  # tokens that are counted or priced at a time
_PASS = 1 << 18  # pairs that are held at a time, about
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # spreads pairs over passes, whatever the vocabulary


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
        self._train: list[NDArray[Any]] = []
        self.tokens = 0
        for stream in train:
            self._train.append(stream[: MAX_TOKENS - self.tokens])
            self.tokens += len(self._train[-1])
        unigram = np.ones(vocab_size)
        self._seen = np.zeros(vocab_size)
        for first, second in self._pairs():
            unigram += np.bincount(second, minlength=vocab_size)
            self._seen += np.bincount(first, minlength=vocab_size)
        self._unigram = unigram / unigram.sum()

    def _pairs(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield neighbours, piece by piece. No pair crosses the end of a document."""
        for stream in self._train:
            for start in range(0, len(stream) - 1, _PIECE):
                tokens = np.asarray(stream[start : start + _PIECE + 1], dtype=np.int64)
                inside = tokens[:-1] != self._end
                yield tokens[:-1][inside], tokens[1:][inside]

    def _count_pairs(
        self, before: NDArray[Any], after: NDArray[Any]
    ) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Return the distinct followers of each token, [V], and how often each target followed the
        token before it, [n]. A pass takes a part of the pairs, so memory does not grow."""
        distinct = np.zeros(self._vocab, dtype=np.int64)
        both = np.zeros(len(before), dtype=np.uint32)
        passes = max(1, -(-self.tokens // _PASS))
        for turn in range(passes):
            codes = [np.zeros(0, dtype=np.int64)]
            for first, second in self._pairs():
                pair = first * self._vocab + second
                part = (pair.astype(np.uint64) * _SPREAD >> np.uint64(32)) % np.uint64(passes)
                codes.append(pair[part == turn])
            pairs, counts = np.unique(np.concatenate(codes), return_counts=True)
            distinct += np.bincount(pairs // self._vocab, minlength=self._vocab)
            for start in range(0, len(before) if len(pairs) else 0, _PIECE):
                targets = slice(start, start + _PIECE)
                wanted = before[targets].astype(np.int64) * self._vocab + after[targets]
                at = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
                both[targets] += np.where(pairs[at] == wanted, counts[at], 0).astype(np.uint32)
        return distinct, both

    def mean_nats(self, before: NDArray[Any], after: NDArray[Any]) -> tuple[float, float]:
        """Mean loss of targets `after` [n], each following `before` [n]: (unigram, bigram)."""
        followers, both = self._count_pairs(before, after)

        def sums(start: int, count: int) -> NDArray[np.float64]:
            """Return both sums over a range. The sum of two halves is cut as numpy cuts it, so the
            result has the bits of a sum over all."""
            if count <= _PIECE:
                part = slice(start, start + count)
                losses = self._nats(before[part], after[part], both[part], followers)
                return np.array([loss.sum() for loss in losses])
            half = count // 2
            half -= half % 8
            return sums(start, half) + sums(start + half, count - half)

        unigram, bigram = sums(0, len(before)) / len(before)
        return float(unigram), float(bigram)

    def _nats(
        self,
        before: NDArray[Any],
        after: NDArray[Any],
        both: NDArray[np.uint32],
        followers: NDArray[np.int64],
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the loss of each target, by unigrams and by bigrams."""
        single = self._unigram[after]
        seen, distinct = self._seen[before], followers[before].astype(np.float64)
        mixed = (both + distinct * single) / np.where(seen > 0, seen + distinct, 1.0)
        double = np.where(seen > 0, mixed, single)
        return -np.log(single), -np.log(double)


def baselines(
    train: Iterable[NDArray[Any]],
    validation: NDArray[Any],
    vocab_size: int,
    end: int,
    tokens_per_byte: float,
) -> dict[str, Any]:
    """Unigram and bigram bits per byte on a validation stream [tokens]; `train`: as Counts."""
    counts = TokenCounts(train, vocab_size, end)
    tokens = validation
    inside = tokens[:-1] != end
    unigram, bigram = counts.mean_nats(tokens[:-1][inside], tokens[1:][inside])
    return {
        "unigram": bits_per_byte(unigram, tokens_per_byte),
        "bigram": bits_per_byte(bigram, tokens_per_byte),
        "train_tokens": counts.tokens,
        "validation_targets": int(inside.sum()),
    }

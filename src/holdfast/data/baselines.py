"""How well counting alone predicts the validation text: what a model must beat to have learnt.

Bits per byte (bpb) do not depend on the tokenizer. Every token of the packed stream is a target
except the first of each document, of which nothing is known; a document's end token is one, so a
document of n text tokens has n targets, and

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


def baselines(
    train: Iterable[NDArray[Any]], validation: NDArray[Any], vocab_size: int, end: int,
    tokens_per_byte: float,
) -> dict[str, Any]:  # fmt: skip
    """Unigram and bigram bits per byte on the validation stream [tokens].

    `train` yields streams (one per source), of which MAX_TOKENS in all are counted. Unigrams
    are smoothed by adding one; bigrams are interpolated with them after Witten and Bell (1991):
    p(b | a) = (c(a, b) + d(a) p(b)) / (c(a) + d(a)), d(a) the number of distinct followers of a.
    """
    codes, counted = [], 0
    for stream in train:
        tokens = np.asarray(stream[: MAX_TOKENS - counted], dtype=np.int64)
        counted += len(tokens)
        codes.append(_pairs(tokens, vocab_size, end))
    pairs, counts = np.unique(np.concatenate(codes), return_counts=True)
    first, second = pairs // vocab_size, pairs % vocab_size
    unigram = np.ones(vocab_size)
    np.add.at(unigram, second, counts)
    unigram /= unigram.sum()
    seen = np.zeros(vocab_size)
    np.add.at(seen, first, counts)
    distinct = np.bincount(first, minlength=vocab_size).astype(np.float64)

    wanted = _pairs(np.asarray(validation, dtype=np.int64), vocab_size, end)
    a, b = wanted // vocab_size, wanted % vocab_size
    at = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    both = np.where(pairs[at] == wanted, counts[at], 0)
    known = seen[a] > 0
    mixed = (both + distinct[a] * unigram[b]) / np.where(known, seen[a] + distinct[a], 1.0)
    bigram = np.where(known, mixed, unigram[b])
    return {
        "unigram": bits_per_byte(float(-np.log(unigram[b]).mean()), tokens_per_byte),
        "bigram": bits_per_byte(float(-np.log(bigram).mean()), tokens_per_byte),
        "train_tokens": counted,
        "validation_targets": len(wanted),
    }


def _pairs(tokens: NDArray[np.int64], vocab_size: int, end: int) -> NDArray[np.int64]:
    """(previous, next) of every target as one number; none crosses the end of a document."""
    inside = tokens[:-1] != end
    codes: NDArray[np.int64] = tokens[:-1][inside] * vocab_size + tokens[1:][inside]
    return codes

"""The MinHash signature of a document: how alike two documents are, in 512 bytes each.

A word is a run of letters, digits and other characters that are not ASCII punctuation. A Chinese or
Japanese character is a word of its own. Capitals count as small letters. A *shingle* is some words
in a row. For each of 256 hash functions the signature has the lowest value over all shingles, of
which the lower 16 bits are kept. The share of equal values estimates the Jaccard similarity of the
two sets of shingles (Broder 1997; Li and Koenig 2010 for the bits).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

HASHES = 256
"""Values of a signature. The error of an estimate of 0.85 has a standard deviation of 0.022."""
BANDS, BAND_VALUES = 32, 8
"""Two documents are compared if all values of one band are equal."""

_BLOCK = 2048  # shingles whose hashes are held at a time: 2 MiB

_IS_WORD = np.ones(0x110000, dtype=bool)
_IS_WORD[:128] = [chr(c).isalnum() for c in range(128)]
_IS_WORD[[0xA0, 0x2028, 0x2029, 0x3000, *range(0x2000, 0x200C)]] = False
_IS_ALONE = np.zeros(0x110000, dtype=bool)
_IS_ALONE[0x3040:0x3100] = _IS_ALONE[0x3400:0xA000] = _IS_ALONE[0x20000:0x30000] = True


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit numbers, each on its own (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _constants(count: int, start: int) -> NDArray[np.uint64]:
    steps = np.arange(1, count + 1, dtype=np.uint64)
    return mix((steps + np.uint64(start)) * np.uint64(0x9E3779B97F4A7C15))


_POWERS = np.cumprod(np.full(4096, 0x9E3779B97F4A7C15 | 1, dtype=np.uint64))
_FACTORS = (_constants(HASHES, 0) >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
_OFFSETS = (_constants(HASHES, HASHES) >> np.uint64(32)).astype(np.uint32)


def word_hashes(text: str) -> NDArray[np.uint64]:
    """Return the hash of each word, in order: uint64 [words]."""
    codes = np.frombuffer(text.lower().encode("utf-32-le", "surrogatepass"), dtype="<u4")
    inside = _IS_WORD[codes]
    alone = _IS_ALONE[codes]
    first = inside.copy()
    first[1:] &= ~inside[:-1] | alone[1:] | alone[:-1]
    starts = np.flatnonzero(first)
    if not len(starts):
        return np.zeros(0, dtype=np.uint64)
    # A word's hash is a sum over its letters, each times a power of its place in the word.
    begin = starts[np.cumsum(first)[inside] - 1]
    place = np.flatnonzero(inside) - begin
    letters = mix(codes[inside].astype(np.uint64)) * _POWERS[place % len(_POWERS)]
    groups = np.searchsorted(np.flatnonzero(inside), starts)
    return mix(np.add.reduceat(letters, groups))


def shingle_hashes(text: str, words: int) -> NDArray[np.uint32]:
    """Return the hashes of the different shingles, sorted: uint32. A document with fewer words is
    one shingle; one without a word has none."""
    hashes = word_hashes(text)
    if not len(hashes):
        return np.zeros(0, dtype=np.uint32)
    sums = gram_sums(hashes, min(words, len(hashes)))
    return np.unique((mix(sums) >> np.uint64(32)).astype(np.uint32))


def gram_sums(hashes: NDArray[np.uint64], width: int) -> NDArray[np.uint64]:
    """Return a number of each run of `width` words, before it is mixed: uint64 [words - width +
    1]; none if there are fewer words."""
    count = max(len(hashes) - width + 1, 0)
    sums = np.zeros(count, dtype=np.uint64)
    for place in range(width if count else 0):
        sums += hashes[place : place + count] * _POWERS[place]
    return sums


def signature(text: str, words: int) -> NDArray[np.uint16]:
    """Return a document's signature: uint16 [HASHES]; all 0 without a word."""
    shingles = shingle_hashes(text, words)
    lowest = np.full(HASHES, 0xFFFFFFFF, dtype=np.uint32)
    for start in range(0, len(shingles), _BLOCK):
        block = shingles[start : start + _BLOCK]
        values = _FACTORS[:, None] * block[None, :] + _OFFSETS[:, None]
        np.minimum(lowest, values.min(axis=1), out=lowest)
    if not len(shingles):
        lowest[:] = 0
    # The lowest values have mostly zeros in front: mixed bits tell them apart.
    mixed = mix(lowest.astype(np.uint64))
    return (mixed & np.uint64(0xFFFF)).astype(np.uint16)


def band_keys(signatures: NDArray[np.uint16], band: int) -> NDArray[np.uint64]:
    """Return a hash of the values of one band: signatures [documents, HASHES] -> uint64
    [documents]."""
    values = signatures[:, band * BAND_VALUES : (band + 1) * BAND_VALUES].astype(np.uint64)
    first = values[:, :4] << (np.arange(4, dtype=np.uint64) * np.uint64(16))
    rest = values[:, 4:] << (np.arange(4, dtype=np.uint64) * np.uint64(16))
    return mix(mix(first.sum(axis=1, dtype=np.uint64)) ^ rest.sum(axis=1, dtype=np.uint64))


def similarity(one: NDArray[np.uint16], rest: NDArray[np.uint16]) -> NDArray[np.float64]:
    """Estimate the similarity of one document [HASHES] to each of [documents, HASHES]."""
    shares: NDArray[np.float64] = np.count_nonzero(rest == one, axis=1) / HASHES
    return shares

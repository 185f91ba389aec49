"""A keyed permutation of [0, size): a shuffle that is computed, never stored.

This is the alternating Feistel network over two moduli of Black and Rogaway. ("Ciphers with
Arbitrary Finite Domains", CT-RSA 2002, section 5, "generalized Feistel".) An index is split into
(left, right) in Z_a x Z_b. Each round adds a keyed function of one half to the other,

    left  <- left  + F_k(right)  mod a        (even rounds)
    right <- right + F_k(left)   mod b        (odd rounds)

which is invertible for every F. With a = ceil(sqrt(size)) and b = ceil(size / a) the domain a*b
exceeds `size` by less than sqrt(size). So *cycle walking* (apply again while the image is outside)
is needed about once in sqrt(size) indices. Powers of two are the usual choice, but walk up to four
times as much for some sizes. Then the cost of an index would depend on the size.

The round function is multiply-xorshift; it mixes, it is not a secret.
"""

from __future__ import annotations

from math import isqrt

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6
MAX_SIZE = 2**62

_MASK = 2**64 - 1
_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB
_U32 = np.uint64(32)
_NM1 = np.uint64(_M1)
_NM2 = np.uint64(_M2)


class Permutation:
    """A bijection of [0, size) chosen by `key` (any integer; its low 64 bits count).

    Raises ValueError when `size` is not in [1, 2**62].
    """

    def __init__(self, size: int, key: int):
        if not 1 <= size <= MAX_SIZE:
            raise ValueError(f"a permutation of {size} elements is impossible")
        self.size = size
        root = isqrt(size - 1) + 1
        self._a = root
        self._b = -(-size // root)
        # SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) from the key.
        keys, state = [], key & _MASK
        for _ in range(ROUNDS):
            state = (state + 0x9E3779B97F4A7C15) & _MASK
            z = state
            z = ((z ^ (z >> 30)) * _M1) & _MASK
            z = ((z ^ (z >> 27)) * _M2) & _MASK
            keys.append(z ^ (z >> 31))
        self._keys = keys
        self._numpy_keys = [np.uint64(k) for k in self._keys]

    def __call__(self, index: int) -> int:
        """The image of one index. Raises IndexError outside [0, size)."""
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} is outside [0, {self.size})")
        a, b = self._a, self._b
        while True:
            left, right = divmod(index, b)
            for turn, key in enumerate(self._keys):
                value = (left if turn & 1 else right) ^ key
                value = ((value ^ (value >> 32)) * _M1) & _MASK
                value = ((value ^ (value >> 29)) * _M2) & _MASK
                value >>= 32
                if turn & 1:
                    right = (right + (value * b >> 32)) % b
                else:
                    left = (left + (value * a >> 32)) % a
            index = left * b + right
            if index < self.size:
                return index

    def apply_many(self, indices: NDArray[np.integer]) -> NDArray[np.int64]:
        """The images of many indices, any shape; element-wise equal to calling each."""
        shape = np.shape(indices)
        value = np.asarray(indices, dtype=np.uint64).reshape(-1)
        if value.size and int(value.max()) >= self.size:
            raise IndexError(f"an index is outside [0, {self.size})")
        out = self._network(value)
        outside = np.flatnonzero(out >= np.uint64(self.size))
        while outside.size:
            again = self._network(out[outside])
            out[outside] = again
            outside = outside[again >= np.uint64(self.size)]
        return out.astype(np.int64).reshape(shape)

    def _network(self, index: NDArray[np.uint64]) -> NDArray[np.uint64]:
        a, b = np.uint64(self._a), np.uint64(self._b)
        left = index // b
        right = index - left * b
        for turn, key in enumerate(self._numpy_keys):
            value = (left if turn & 1 else right) ^ key
            value = (value ^ (value >> _U32)) * _NM1
            value = (value ^ (value >> np.uint64(29))) * _NM2
            value >>= _U32
            if turn & 1:
                right = _add(right, (value * b) >> _U32, b)
            else:
                left = _add(left, (value * a) >> _U32, a)
        return left * b + right


class LocalPermutation:
    """Moves each index of [0, size) within its block of `block` only; with 1 none moves. Raises
    ValueError as `Permutation` does."""

    def __init__(self, size: int, key: int, block: int):
        self.size = size
        self._key, self._block = key, block

    def apply_many(self, indices: NDArray[np.integer]) -> NDArray[np.int64]:
        """The images of many indices [n]."""
        number, within = np.divmod(np.asarray(indices, dtype=np.int64), self._block)
        if self._block > 1:
            for one in np.unique(number).tolist():
                size = min(self._block, self.size - one * self._block)
                mine = number == one
                within[mine] = Permutation(size, self._key + one).apply_many(within[mine])
        return number * self._block + within


def _add(x: NDArray[np.uint64], y: NDArray[np.uint64], modulus: np.uint64) -> NDArray[np.uint64]:
    """x + y modulo `modulus`, both below it: a subtraction costs less than a division."""
    total = x + y
    total -= np.where(total >= modulus, modulus, np.uint64(0))
    return total

"""The keyed permutation: a bijection for every size, the same by either path."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.data.permutation import MAX_SIZE, Permutation

KEYS = st.integers(0, 2**63 - 1)


@given(size=st.integers(1, 3000), key=KEYS)
@settings(deadline=None, max_examples=60)
def test_every_size_is_permuted(size: int, key: int) -> None:
    image = Permutation(size, key).apply_many(np.arange(size))
    assert np.array_equal(np.sort(image), np.arange(size))


@given(size=st.integers(1, MAX_SIZE), key=KEYS, where=st.floats(0, 1, exclude_max=True))
@settings(deadline=None, max_examples=100)
def test_one_index_equals_the_vectorised_path(size: int, key: int, where: float) -> None:
    permutation = Permutation(size, key)
    index = min(int(size * where), size - 1)
    image = permutation(index)
    assert 0 <= image < size
    assert permutation.apply_many(np.array([[index]])).tolist() == [[image]]


@given(key=KEYS, start=st.integers(0, 10**12 - 5000))
@settings(deadline=None, max_examples=20)
def test_no_collision_within_a_large_domain(key: int, start: int) -> None:
    image = Permutation(10**12, key).apply_many(np.arange(start, start + 5000))
    assert len(np.unique(image)) == 5000


@pytest.mark.parametrize("size", [10**6, 2**20, 2**20 + 1, 10**12, 2**40 + 1])
def test_the_domain_hardly_exceeds_the_size(size: int) -> None:
    """Cycle walking is what could make an index cost more for one size than for another."""
    permutation = Permutation(size, 1)
    domain = permutation._a * permutation._b
    assert size <= domain <= size + 2 * size**0.5


def test_keys_give_unrelated_orders() -> None:
    size, keys = 997, 400
    images = np.stack([Permutation(size, key).apply_many(np.arange(size)) for key in range(keys)])
    # Where a fixed index goes must be uniform over keys: chi-squared over ten bins of 100, whose
    # 99.99 % point for nine degrees of freedom is 33.7.
    for index in (0, 1, size // 2, size - 1):
        seen = np.histogram(images[:, index], bins=10, range=(0, size))[0]
        assert ((seen - keys / 10) ** 2 / (keys / 10)).sum() < 33.7
    # Neighbours must not stay neighbours: about two pairs in `size` would by chance.
    steps = np.abs(np.diff(images, axis=1))
    assert (steps == 1).mean() < 4 * 2 / size


def test_a_known_value_never_changes() -> None:
    """The order of every run that was ever audited depends on these."""
    assert Permutation(1000, 7).apply_many(np.arange(6)).tolist() == [884, 918, 794, 872, 162, 328]


def test_bad_arguments_are_refused() -> None:
    for size in (0, -1, MAX_SIZE + 1):
        with pytest.raises(ValueError, match="impossible"):
            Permutation(size, 1)
    with pytest.raises(IndexError):
        Permutation(10, 1)(10)
    with pytest.raises(IndexError):
        Permutation(10, 1).apply_many(np.array([3, 10]))
    with pytest.raises(IndexError):
        Permutation(10, 1).apply_many(np.array([-1]))

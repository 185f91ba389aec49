"""Keyed seeds: fixed values, no collisions between keys that look alike."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.seeds import key_seed

PARTS = st.lists(st.one_of(st.integers(-(2**70), 2**70), st.text(max_size=8)), max_size=4)


def test_values_are_part_of_the_format() -> None:
    assert key_seed(0, "init", "embed.weight") == 7846031751278615929
    assert key_seed(1, "sample", 7, 12) == 8253341781070720133


@given(PARTS, PARTS)
def test_different_keys_have_different_seeds(a: list[int | str], b: list[int | str]) -> None:
    same = [(type(x), x) for x in a] == [(type(x), x) for x in b]
    assert (key_seed(1, "p", *a) == key_seed(1, "p", *b)) == same


@given(st.integers(0, 2**63 - 1), st.text(max_size=20), PARTS)
def test_every_seed_is_a_torch_seed(seed: int, purpose: str, parts: list[int | str]) -> None:
    assert 0 <= key_seed(seed, purpose, *parts) < 2**63


def test_neighbouring_items_do_not_run_together() -> None:
    keys = [("ab", "c"), ("a", "bc"), ("abc",), (1, 1), (11,), ("1", 1), (1, "1"), ("", "abc")]
    assert len({key_seed(1, "p", *key) for key in keys}) == len(keys)


def test_bits_are_spread_evenly() -> None:
    seeds = [key_seed(3, "sample", step) for step in range(4000)]
    for bit in range(63):
        share = sum(seed >> bit & 1 for seed in seeds) / len(seeds)
        assert 0.45 < share < 0.55  # six standard deviations

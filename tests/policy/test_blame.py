"""Data or device: every combination of evidence has its verdict."""

from __future__ import annotations

from itertools import product

import pytest

from holdfast.policy.blame import TABLE, Blame, Trial, Tried, verdict


def trials(words: str) -> list[Trial]:
    """ "a- b+" was bad on a, then good on b."""
    return [Trial(word[0], word[1] == "-") for word in words.split()]


@pytest.mark.parametrize(
    ("words", "blame"),
    [
        ("a-", Blame.UNKNOWN),
        ("a- a-", Blame.UNKNOWN),
        ("a- b-", Blame.DATA),
        ("a- a- b- c-", Blame.DATA),
        ("a- b+", Blame.DEVICE),
        ("a- b+ a-", Blame.DEVICE),
        ("a- b+ a+", Blame.UNKNOWN),
        ("a- b- c+", Blame.UNKNOWN),
        ("a- a+", Blame.UNKNOWN),
        ("a+ b- a-", Blame.UNKNOWN),
        ("a+ b-", Blame.DEVICE),
    ],
)
def test_verdicts(words: str, blame: Blame) -> None:
    found = verdict(trials(words))
    assert found.blame is blame
    assert found.device == next(word[0] for word in words.split() if word[1] == "-")


def test_a_verdict_is_a_sentence() -> None:
    assert verdict(trials("a- b+")).why == (
        "bad on a; on 1 other device good; on the same again not tried"
    )


def test_the_table_is_whole() -> None:
    assert set(TABLE) == set(product(Tried, Tried))


def test_without_a_fault_there_is_no_blame() -> None:
    with pytest.raises(ValueError, match="nothing was bad"):
        verdict(trials("a+ b+"))

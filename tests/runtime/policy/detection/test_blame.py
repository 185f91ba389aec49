"""Data or device: every kind of evidence has its verdict."""

from __future__ import annotations

import pytest

from holdfast.policy.detection.bad_steps import Culprit, Trial, assign_blame


def trials(words: str) -> list[Trial]:
    """ "a- b+" was bad on a, then good on b."""
    return [Trial(word[0], word[1] == "-") for word in words.split()]


@pytest.mark.parametrize(
    ("words", "blame"),
    [
        ("a-", Culprit.UNKNOWN),
        ("a- a-", Culprit.UNKNOWN),
        ("a- b-", Culprit.DATA),
        ("a- a- b- c-", Culprit.DATA),
        ("a- b+", Culprit.DEVICE),
        ("a- b+ a-", Culprit.DEVICE),
        ("a- b+ a+", Culprit.DEVICE),
        ("a- b- c+", Culprit.UNKNOWN),
        ("a- a+", Culprit.DEVICE),
        ("a+ b- a-", Culprit.UNKNOWN),
        ("a+ b-", Culprit.DEVICE),
    ],
)
def test_verdicts(words: str, blame: Culprit) -> None:
    found = assign_blame(trials(words))
    assert found.blame is blame
    assert found.device == next(word[0] for word in words.split() if word[1] == "-")


@pytest.mark.parametrize(
    ("words", "blame"),
    [("a-", Culprit.UNKNOWN), ("a- a-", Culprit.DATA), ("a- a+ a-", Culprit.DEVICE)],
)
def test_where_there_is_one_device_only_data_that_stays_bad_is_to_blame(
    words: str, blame: Culprit
) -> None:
    assert assign_blame(trials(words), only_device=True).blame is blame


def test_a_verdict_is_a_sentence() -> None:
    assert assign_blame(trials("a- a- b+")).reason == "bad on a, 2 times; good on b"
    assert assign_blame(trials("a- b-")).reason == "bad on a and b, 2 times; good nowhere"


def test_without_a_fault_there_is_no_blame() -> None:
    with pytest.raises(ValueError, match="nothing was bad"):
        assign_blame(trials("a+ b+"))

"""Data or device: every kind of evidence has its verdict."""

from __future__ import annotations

import pytest

from holdfast.policy.detection.blame import Blame, Trial, verdict


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
        ("a- b+ a+", Blame.DEVICE),
        ("a- b- c+", Blame.UNKNOWN),
        ("a- a+", Blame.DEVICE),
        ("a+ b- a-", Blame.UNKNOWN),
        ("a+ b-", Blame.DEVICE),
    ],
)
def test_verdicts(words: str, blame: Blame) -> None:
    found = verdict(trials(words))
    assert found.blame is blame
    assert found.device == next(word[0] for word in words.split() if word[1] == "-")


@pytest.mark.parametrize(
    ("words", "blame"),
    [("a-", Blame.UNKNOWN), ("a- a-", Blame.DATA), ("a- a+ a-", Blame.DEVICE)],
)
def test_where_there_is_one_device_only_data_that_stays_bad_is_to_blame(
    words: str, blame: Blame
) -> None:
    assert verdict(trials(words), only=True).blame is blame


def test_a_verdict_is_a_sentence() -> None:
    assert verdict(trials("a- a- b+")).why == "bad on a, 2 times; good on b"
    assert verdict(trials("a- b-")).why == "bad on a and b, 2 times; good nowhere"


def test_without_a_fault_there_is_no_blame() -> None:
    with pytest.raises(ValueError, match="nothing was bad"):
        verdict(trials("a+ b+"))

"""Every order in which three generations begin, save and commit: see
`tests/support/durable_commit_model.py`."""

from __future__ import annotations

import pytest

from tests.support.durable_commit_model import BranchError, World, commits, search

STAGES = ("opened", "settled", "chosen", "checked")
SAVES = ("part", "whole", "checked")


@pytest.fixture(scope="module")
def worlds() -> list[World]:
    """In each of them one line of the run counts, and all of it."""
    return list(search())


def test_never_two_lines_of_a_run(worlds: list[World]) -> None:
    assert len(worlds) > 10_000
    late = [w for w in worlds if any(g < 3 for _, g in commits(w.objects)) and w.lines[2].base[0]]
    assert late  # some begin from what others committed


@pytest.mark.parametrize("stage", STAGES)
def test_who_begins_a_generation_is_lost_at(stage: str, worlds: list[World]) -> None:
    """Right there, in every world that has it: the next one begins, whatever the lost one left."""
    assert any(w.lines[1].begins == stage for w in worlds)
    after = [w for w in worlds if w.lines[1].begins == "lost" and w.lines[2].begins == "begun"]
    assert after


@pytest.mark.parametrize("stage", SAVES)
def test_who_commits_sleeps_at(stage: str, worlds: list[World]) -> None:
    """For as long as it takes until the next generation has begun; and it wakes: what it writes
    then counts only if the newer one did not begin from an older step (`safe` has looked)."""
    slept = [w for w in worlds if w.lines[0].saves == stage and w.lines[1].begins == "begun"]
    assert slept
    woken = [w for w in worlds if w.lines[0].saves == "done" and w.lines[1].begins == "begun"]
    assert {w.lines[1].base[0] for w in woken} == {0, 1}


def test_a_note_that_comes_late_would_be_found_out() -> None:
    """The search sees what it is for: without `settle`, a note that was about to be written when
    its generation was overtaken gives up what the newer one stands on."""
    with pytest.raises(BranchError, match="which is given up"):
        search(lambda store, generation: None)

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
    assert late  # some begin from commits of another generation


@pytest.mark.parametrize("stage", STAGES)
def test_who_begins_a_generation_is_lost_at(stage: str, worlds: list[World]) -> None:
    """Right there, in every world that has it: the next one begins, whatever the lost one left."""
    assert any(w.lines[1].begins == stage for w in worlds)
    after = [w for w in worlds if w.lines[1].begins == "lost" and w.lines[2].begins == "begun"]
    assert after


@pytest.mark.parametrize("stage", SAVES)
def test_who_commits_sleeps_at(stage: str, worlds: list[World]) -> None:
    """The committing process sleeps until the next generation has begun, and wakes. Its later
    writes count only if the newer one did not begin from an older step (`safe` has checked)."""
    slept = [w for w in worlds if w.lines[0].saves == stage and w.lines[1].begins == "begun"]
    assert slept
    woken = [w for w in worlds if w.lines[0].saves == "done" and w.lines[1].begins == "begun"]
    assert {w.lines[1].base[0] for w in woken} == {0, 1}


def test_a_note_that_comes_late_would_be_found_out() -> None:
    """The search finds the fault that it is for. Without `settle`, a late note of an overtaken
    generation gives up the state that the newer one began from."""
    with pytest.raises(BranchError, match="which is given up"):
        search(lambda store, generation: None)

"""The commands of the runbooks look at a recorded run, and each says something about it."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from tests.runtime.cli.conftest import Trained
from tests.support.commands import within
from tests.support.ranks import ROOT

PAGES = sorted((ROOT / "docs/runbooks").glob("*.md"))
MEANING = {0, 1}  # exit codes: 1 says that a run has ended, or that something will fail


def commands_of(page: Path) -> list[str]:
    """The commands below "Look"."""
    look = page.read_text().partition("## Look")[2].partition("## Do")[0]
    return re.findall(r"^    holdfast (.+)$", look, re.MULTILINE)


@cache
def said(command: str, folder: Path) -> str:
    done = within(*(str(folder) if word == "RUN" else word for word in shlex.split(command)))
    assert done.code in MEANING, done.err
    assert "Traceback" not in done.out + done.err
    return done.out + done.err


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_runbook_look_at_a_run(page: Path, trained: Trained) -> None:
    found = commands_of(page)
    assert found
    for command in found:
        assert "RUN" in command.split()
        assert said(command, trained.folder).strip(), command
    explained = re.findall(r"^- `holdfast (.+)`: ", page.read_text(), re.MULTILINE)
    assert explained == found, "each command has a line that says what it shows"

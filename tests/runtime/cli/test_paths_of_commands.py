"""Paths on the command line of every command: the home is filled in, a variable is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import here


@pytest.mark.parametrize(
    "arguments",
    [
        ("report", "$SCRATCH/run"),
        ("export", "run", "--to", "$SCRATCH/hf"),
        ("checkpoint", "list", "$SCRATCH/run"),
        ("checkpoint", "diff", "$SCRATCH/a", "b"),
        ("checkpoint", "import", "run.yaml", "--from", "$SCRATCH/hf"),
        ("init", "$SCRATCH/run.yaml"),
        ("data", "verify", "$SCRATCH/run.yaml"),
        ("config", "show", "folder=$SCRATCH/run"),
    ],
)
def test_a_variable_is_refused(
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SCRATCH", raising=False)
    outcome = here(capsys, *arguments)
    outcome.refuses("has a $", "command line")
    assert list(tmp_path.iterdir()) == []


def test_the_home_is_filled_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An option as --to=~/x reaches a program with its ~."""
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    assert here(capsys, "init", "~/run.yaml").code == 0
    assert (tmp_path / "home" / "run.yaml").exists()
    here(capsys, "report", "~/nothing").refuses(f"{tmp_path}/home/nothing")
    here(capsys, "export", "~/nothing", "--to=~/x").refuses(f"{tmp_path}/home/nothing")
    assert list((tmp_path / "here").iterdir()) == []

"""Ctrl-C in a study: one sentence, exit code 130, and the same command uses what was complete."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.main import main
from holdfast_lab.admission import outcome as admission_study
from holdfast_lab.engine import study_replays
from tests.lab.commands.test_simulate import files, simulate

__all__ = ["files"]  # the fixture of the run, the machines and the trace
STUDY = ("--policy", "holdfast", "--policy", "restart", "--seeds", "2")


class Calls:
    """Counts the calls of a function, and presses Ctrl-C in the one of a number."""

    def __init__(self, function: Callable[..., Any], interrupted: int) -> None:
        self.number, self._function, self._interrupted = 0, function, interrupted

    def __call__(self, *given: Any) -> Any:
        self.number += 1
        if self.number == self._interrupted:
            raise KeyboardInterrupt
        return self._function(*given)


def press_in(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, number: int = 0) -> Calls:
    calls = Calls(getattr(module, name), number)
    monkeypatch.setattr(module, name, calls)
    return calls


@pytest.mark.usefixtures("files")
def test_an_interrupted_simulation_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate("--json", *STUDY) == 0
    fresh = capsys.readouterr().out
    with monkeypatch.context() as patch:
        press_in(patch, study_replays, "run_case", 3)
        assert simulate("--json", *STUDY, "--out", "made") == 130
    told = "holdfast simulate: interrupted; 2 of 4 replays are kept in made; "
    assert capsys.readouterr().err.endswith(f"{told}the same command continues\n")
    with Path("made/replays.jsonl").open("a") as lines:
        lines.write('{"key": "cut')  # as a kill in the middle of a line leaves it
    calls = press_in(monkeypatch, study_replays, "run_case")
    assert simulate("--json", *STUDY, "--out", "made") == 0
    again = capsys.readouterr()
    assert (calls.number, again.out) == (2, fresh)
    assert "2 of 4 replays were kept in made" in again.err
    assert json.loads(Path("made/simulated.json").read_text())["policy"] == "holdfast"


@pytest.mark.usefixtures("files")
def test_what_an_interrupted_first_replay_left_is_dropped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        press_in(patch, study_replays, "run_case", 1)
        assert simulate("--out", "made") == 130
    assert capsys.readouterr().err.endswith("interrupted; no replay was complete\n")
    assert Path("made/resolved.json").exists()
    assert not Path("made/simulated.json").exists()
    assert simulate("--out", "made") == 0
    assert json.loads(Path("made/simulated.json").read_text())["interruptions"] == 2


@pytest.mark.usefixtures("files")
def test_other_inputs_use_nothing_that_was_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--out", "made") == 0
    kept = Path("made/replays.jsonl").read_text()
    for name, old, new in (
        ("run.yaml", "batch_size: 32", "batch_size: 64"),
        ("nodes.csv", "3600000,add", "3700000,add"),
        ("machines.yaml", "usd_per_hour: 2", "usd_per_hour: 3"),
    ):
        content = Path(name).read_text()
        Path(name).write_text(content.replace(old, new))
        capsys.readouterr()
        assert simulate("--out", "made") == 2, name
        assert "a study continues only with the same run file" in capsys.readouterr().err
        Path(name).write_text(content)
    assert Path("made/replays.jsonl").read_text() == kept


def test_an_interrupted_admission_study_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "made")
    words = ["simulate", "admission", "--cluster", "4x8xA100-80", "--days", "1", "--json"]
    words += ["--policy", "gang", "--policy", "pods", "--seeds", "2"]
    assert main(words) == 0
    fresh = capsys.readouterr().out
    with monkeypatch.context() as patch:
        press_in(patch, admission_study, "admit_jobs", 4)
        assert main([*words, "--out", out]) == 130
    assert f"3 of 4 replays are kept in {out}" in capsys.readouterr().err
    calls = press_in(monkeypatch, admission_study, "admit_jobs")
    assert main([*words, "--out", out]) == 0
    assert (calls.number, capsys.readouterr().out) == (1, fresh)
    assert main([*words, "--load", "0.5", "--out", out]) == 0
    assert calls.number == 5
    assert capsys.readouterr().out != fresh

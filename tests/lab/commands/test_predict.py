"""`holdfast predict`: fit and judge, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.cli.main import main


def test_fit_and_judge_what_came_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["trace", "make", "spot", "--to", "s.jsonl", "--days", "1"]) == 0
    assert main(["trace", "make", "spot", "--to", "u.jsonl", "--days", "0.5", "--seed", "7"]) == 0
    fit = ["predict", "fit", "s.jsonl", "--to", "m.json", "--horizon", "1200", "--no-lstm"]
    assert main(fit) == 0
    captured = capsys.readouterr()
    assert "hazard" in captured.out
    assert "chosen: " in captured.err
    assert main(["predict", "judge", "s.jsonl", "u.jsonl", "--model", "m.json", "--json"]) == 0
    seen, unseen = json.loads(capsys.readouterr().out)
    # Of the trace that the fit has seen, only the rest is judged.
    assert seen["start_s"] == pytest.approx(0.6 * 86400, rel=0.01)
    assert unseen["start_s"] == 0
    assert unseen["models"][0]["model"] == "never"
    assert all(0 <= row["precision"] <= 1 for row in unseen["models"])
    assert main(["predict", "judge", "u.jsonl", "--model", "m.json"]) == 0
    printed = capsys.readouterr().out
    assert "average precision" in printed
    assert "calibration of" in printed

"""`holdfast trace`: convert, show, fit, make and plot, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import within

NAMED = "0,add,n1\n0,add,n2\n60000,add,n3\n120000,remove,n1\n120000,remove,n2\n180000,add,n4\n"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "nodes.csv"
    path.write_text(NAMED)
    return path


def test_convert_and_show(file: Path) -> None:
    made = within("trace", "convert", file, "--to", "a.jsonl", "--notice", "30").succeeds()
    assert "6 rows (named nodes)" in made.err
    rows = [json.loads(line) for line in Path("a.jsonl").read_text().splitlines()]
    assert list(rows[0])[:5] == ["trace", "source", "sha256", "rows", "t0"]
    kinds = ["join", "notice", "notice", "preempt", "preempt", "join"]
    assert [row["kind"] for row in rows[3:]] == kinds
    shown = within("trace", "show", "a.jsonl").succeeds().out
    assert "1 instants, 2.00 nodes each: 2 x1" in shown
    value = json.loads(within("trace", "show", "a.jsonl", "--json").succeeds().out)
    assert (value["churn"]["lost"], value["events"]["notice"]) == (2, 2)


def test_files_of_several_kinds_become_one_trace(file: Path) -> None:
    """The name of a file is a label for its nodes, and chooses nothing from a table of prices."""
    Path("prices.csv").write_text(
        "date,machine_type,region,usd_per_hour_on_demand,usd_per_hour_spot\n"
        "2023-05-08,m,mars-1,3.0,1.0\n"
    )
    found = json.loads(within("trace", "show", file, "prices.csv", "--json").succeeds().out)
    assert (found["events"]["join"], found["events"]["price"]) == (4, 1)
    within("trace", "convert", file, "prices.csv", "--to", "both.jsonl").succeeds()
    rows = [json.loads(line) for line in Path("both.jsonl").read_text().splitlines()[1:]]
    assert {row["zone"] for row in rows} == {"nodes", "mars-1"}


def test_make_fit_and_plot(file: Path) -> None:
    within("trace", "make", "spot", "--to", "s.jsonl", "--set", "nodes=8").succeeds()
    printed = within("trace", "fit", "s.jsonl").succeeds().out
    command = next(line.split() for line in printed.splitlines() if "holdfast trace" in line)
    within(*command[1:]).succeeds()
    [found] = json.loads(within("trace", "fit", "made.jsonl", "--json").succeeds().out)
    assert (found["generator"], found["parameters"]["nodes"]) == ("spot", 8)
    shown = within("trace", "plot", "s.jsonl", "--svg", "s.svg").succeeds()
    assert "nodes that work" in shown.out
    assert Path("s.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["show", "none.csv"], "none.csv: the file cannot be read: No such file"),
        (["show", "bad.csv"], "bad.csv:2: '60000,gone,n1' is no row; write 'time_ms,add,node'"),
        (["convert", "nodes.csv", "--to", "nodes.csv"], "this is the file that is read"),
        (["make", "spot", "--to", "a", "--set", "x=1"], "spot has no parameter 'x'"),
    ],
)
def test_a_mistake_is_one_sentence(file: Path, words: list[str], says: str) -> None:
    Path("bad.csv").write_text("0,add,n1\n60000,gone,n1\n")
    within("trace", *words).refuses(says)


# --- `holdfast predict` ---------------------------------------------------------------------------
def test_fit_and_judge_what_came_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    within("trace", "make", "spot", "--to", "s.jsonl", "--days", "1").succeeds()
    within("trace", "make", "spot", "--to", "u.jsonl", "--days", "0.5", "--seed", "7").succeeds()
    fit = ["predict", "fit", "s.jsonl", "--to", "m.json", "--horizon", "1200", "--no-lstm"]
    fitted = within(*fit).succeeds()
    assert "hazard" in fitted.out
    assert "chosen: " in fitted.err
    judged = within("predict", "judge", "s.jsonl", "u.jsonl", "--model", "m.json", "--json")
    seen, unseen = json.loads(judged.succeeds().out)
    # Of the trace that the fit has seen, only the rest is judged.
    assert seen["start_s"] == pytest.approx(0.6 * 86400, rel=0.01)
    assert unseen["start_s"] == 0
    assert unseen["models"][0]["model"] == "never"
    assert all(0 <= row["precision"] <= 1 for row in unseen["models"])
    printed = within("predict", "judge", "u.jsonl", "--model", "m.json").succeeds().out
    assert "average precision" in printed
    assert "calibration of" in printed

"""`holdfast trace`: convert, show, fit, make and plot, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.cli.main import main

NAMED = "0,add,n1\n0,add,n2\n60000,add,n3\n120000,remove,n1\n120000,remove,n2\n180000,add,n4\n"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "nodes.csv"
    path.write_text(NAMED)
    return path


def test_convert_and_show(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "convert", str(file), "--to", "a.jsonl", "--notice", "30"]) == 0
    assert "6 rows (named nodes)" in capsys.readouterr().err
    rows = [json.loads(line) for line in Path("a.jsonl").read_text().splitlines()]
    assert list(rows[0])[:5] == ["trace", "source", "sha256", "rows", "t0"]
    assert [row["kind"] for row in rows[3:]] == [
        "join",
        "notice",
        "notice",
        "preempt",
        "preempt",
        "join",
    ]
    assert main(["trace", "show", "a.jsonl"]) == 0
    shown = capsys.readouterr().out
    assert "1 instants, 2.00 nodes each: 2 x1" in shown
    assert main(["trace", "show", "a.jsonl", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["churn"]["lost"], value["events"]["notice"]) == (2, 2)


def test_files_of_several_kinds_become_one_trace(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name of a file is a label for its nodes, and chooses nothing from a table of prices."""
    Path("prices.csv").write_text(
        "date,machine_type,region,usd_per_hour_on_demand,usd_per_hour_spot\n"
        "2023-05-08,m,mars-1,3.0,1.0\n"
    )
    assert main(["trace", "show", str(file), "prices.csv", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["events"]["join"], found["events"]["price"]) == (4, 1)
    assert main(["trace", "convert", str(file), "prices.csv", "--to", "both.jsonl"]) == 0
    rows = [json.loads(line) for line in Path("both.jsonl").read_text().splitlines()[1:]]
    assert {row["zone"] for row in rows} == {"nodes", "mars-1"}


def test_make_fit_and_plot(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "make", "spot", "--to", "s.jsonl", "--set", "nodes=8"]) == 0
    assert main(["trace", "fit", "s.jsonl"]) == 0
    printed = capsys.readouterr().out
    command = next(line.split() for line in printed.splitlines() if "holdfast trace" in line)
    assert main(command[1:]) == 0
    capsys.readouterr()
    assert main(["trace", "fit", "made.jsonl", "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert (found["generator"], found["parameters"]["nodes"]) == ("spot", 8)
    assert main(["trace", "plot", "s.jsonl", "--svg", "s.svg"]) == 0
    assert "nodes that work" in capsys.readouterr().out
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
def test_a_mistake_is_one_sentence(
    file: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.csv").write_text("0,add,n1\n60000,gone,n1\n")
    assert main(["trace", *words]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1

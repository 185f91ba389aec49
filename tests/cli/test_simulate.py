"""`holdfast simulate`, as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.main import main

RUN = """\
name: small
device: cuda
model: {preset: tiny, vocab_size: 1000, max_position: 512}
data: {sequence_length: 512}
train: {steps: 4000, batch_size: 32, precision: bf16}
"""
MACHINES = """\
pools:
  spot:
    device: A100-80
    devices: 1
    nodes: 4
    outside: {type: roce-100, per: node}
    usd_per_hour: 2
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)
    Path("machines.yaml").write_text(MACHINES)
    rows = [f"0,add,n{index}" for index in range(4)]
    rows += ["600000,remove,n0", "900000,add,n4", "2400000,remove,n1", "2400000,remove,n2"]
    rows += ["3000000,add,n5", "3600000,add,n6"]
    Path("nodes.csv").write_text("\n".join(rows) + "\n")
    return tmp_path


def simulate(*more: str) -> int:
    given = ["run.yaml", "--cluster", "machines.yaml", "--trace", "nodes.csv"]
    return main(["simulate", *given, *more])


def answer(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert simulate("--json", *more) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value


def test_the_table_and_the_numbers(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--svg", "chart.svg") == 0
    shown = capsys.readouterr().out
    assert "holdfast" in shown
    assert "productive" in shown
    assert Path("chart.svg").read_text().startswith("<svg")
    ledger = answer(capsys)["outcomes"][0]["histories"][0]
    assert ledger["interruptions"] == 2
    assert sum(ledger["seconds_by_class"].values()) == pytest.approx(ledger["wall_seconds"])
    assert ledger["usd"] == pytest.approx(2 * ledger["node_hours"])


def test_the_report_of_a_simulated_run_says_what_the_simulation_says(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = ("--set", "communicator_s=20", "--set", "peers=0", "--set", "replicas_go_on=0")
    more = ("--set", "store_interval_s=97", "--out", "made")
    ledger = answer(capsys, *slow, *more)["outcomes"][0]["histories"][0]
    assert main(["report", "made", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["wall_seconds"] == pytest.approx(ledger["wall_seconds"])
    assert report["seconds_by_class"]["rework"] > 0
    for label, seconds in ledger["seconds_by_class"].items():  # the last step never ended
        assert report["seconds_by_class"][label] == pytest.approx(seconds, abs=0.1), label
    lost = [incident for incident in report["incidents"] if incident["losses"]]
    assert len(lost) == ledger["interruptions"]
    assert main(["report", "made"]) == 0


def test_a_sweep_has_a_row_for_each_value(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--sweep", "store_interval_s=30,1500", "--set", "peers=0")
    names = [outcome["policy"] for outcome in found["outcomes"]]
    assert names == ["holdfast store_interval_s=30", "holdfast store_interval_s=1500"]
    often, seldom = (outcome["histories"][0]["saves"]["2"] for outcome in found["outcomes"])
    assert often > 10 * seldom > 0
    keys = answer(capsys, "--sweep", "train.batch_size=32,64")
    assert len({o["estimates"]["tokens_per_s"]["mean"] for o in keys["outcomes"]}) == 2


def test_more_histories_give_an_interval(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--seeds", "4")["outcomes"][0]
    assert len(found["histories"]) == 4
    interval = found["estimates"]["tokens"]
    assert interval["low"] < interval["mean"] < interval["high"]


def test_a_run_is_simulated_to_its_end(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--until-done")["outcomes"][0]["histories"][0]
    assert found["finished"]
    assert found["tokens"] == pytest.approx(4000 * 32 * 512)


def test_a_made_trace_needs_no_file(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "run.yaml", "--cluster", "machines.yaml", "--make", "spot", "--json"]
    assert main([*words, "--days", "0.2", "--set", "between_s=900", "--seeds", "2"]) == 0
    one, two = json.loads(capsys.readouterr().out)["outcomes"][0]["histories"]
    assert one["interruptions"] != two["interruptions"] or one["tokens"] != two["tokens"]


def test_notices_spare_work(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--sweep", "notice_s=0,60", "--set", "replicas_go_on=0")
    without, noticed = (outcome["histories"][0] for outcome in found["outcomes"])
    assert without["interruptions"] == 2
    assert noticed["interruptions"] == 0

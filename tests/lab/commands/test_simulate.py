"""`holdfast simulate`, as a user calls it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast_lab.admission import outcome as admission_study
from holdfast_lab.engine import study_replays
from holdfast_lab.traces.events import EventStream, TraceEvent, TraceHeader
from holdfast_lab.traces.stream_file import format_stream
from tests.support.commands import Outcome, within

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


def simulate(*more: str) -> Outcome:
    return within(
        "simulate", "run.yaml", "--cluster", "machines.yaml", "--trace", "nodes.csv", *more
    )


def answer(*more: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(simulate("--json", *more).succeeds().out)
    return value


def test_the_table_and_the_numbers(files: Path) -> None:
    shown = simulate("--svg", "chart.svg").succeeds().out
    assert "holdfast" in shown
    assert "productive" in shown
    assert Path("chart.svg").read_text().startswith("<svg")
    ledger = answer()["outcomes"][0]["histories"][0]
    assert ledger["interruptions"] == 2
    assert sum(ledger["seconds_by_class"].values()) == pytest.approx(ledger["wall_seconds"])
    assert ledger["usd"] == pytest.approx(2 * ledger["node_hours"])


def test_after_losses_the_next_plan_is_for_goodput(files: Path) -> None:
    def next_plan(*more: str) -> str:
        return simulate(*more).succeeds().out.splitlines()[-1]

    plan = "next: holdfast plan run.yaml --cluster machines.yaml"
    assert next_plan("plan.objective=time") == f"{plan} plan.objective=goodput"
    objective = "plan.objective=tokens_per_usd"  # one of its own is kept
    assert next_plan(objective) == f"{plan} {objective}"
    Path("nodes.csv").write_text("0,add,n0\n0,add,n1\n0,add,n2\n0,add,n3\n3600000,add,n4\n")
    assert next_plan() == plan


def test_the_report_of_a_simulated_run_says_what_the_simulation_says(files: Path) -> None:
    slow = ("--set", "communicator_s=20", "--set", "peers=0", "--set", "replicas_go_on=0")
    more = ("--set", "store_interval_s=97", "--out", "made")
    ledger = answer(*slow, *more)["outcomes"][0]["histories"][0]
    report = json.loads(within("report", "made", "--json").succeeds().out)
    assert report["wall_seconds"] == pytest.approx(ledger["wall_seconds"])
    assert report["seconds_by_class"]["rework"] > 0
    for label, seconds in ledger["seconds_by_class"].items():  # the last step never ended
        assert report["seconds_by_class"][label] == pytest.approx(seconds, abs=0.1), label
    lost = [incident for incident in report["incidents"] if incident["losses"]]
    assert len(lost) == ledger["interruptions"]
    changes = [incident["title"] for incident in report["incidents"] if incident["planned"]]
    assert changes == ["n4 joined", "n5 joined"]
    assert "data prepare" not in within("report", "made").succeeds().err
    status = within("status", "made")
    assert status.code == 1  # nothing is at work
    assert "simulated" in status.out
    assert "continue with" not in status.out
    story = within("postmortem", "made").succeeds().out
    assert "# Post-mortem: small" in story
    assert "count from the start of the simulation" in story
    assert "1970" not in story
    assert "simulated" in within("cost", "show", "made").succeeds().err


def test_a_sweep_has_a_row_for_each_value(files: Path) -> None:
    found = answer("--sweep", "store_interval_s=30,1500", "--set", "peers=0")
    names = [outcome["policy"] for outcome in found["outcomes"]]
    assert names == ["holdfast store_interval_s=30", "holdfast store_interval_s=1500"]
    often, seldom = (outcome["histories"][0]["saves"]["2"] for outcome in found["outcomes"])
    assert often > 10 * seldom > 0
    keys = answer("--sweep", "train.batch_size=32,64")
    assert len({o["estimates"]["tokens_per_s"]["mean"] for o in keys["outcomes"]}) == 2


def test_more_histories_give_an_interval(files: Path) -> None:
    found = answer("--seeds", "4")["outcomes"][0]
    assert len(found["histories"]) == 4
    interval = found["estimates"]["tokens"]
    assert interval["low"] < interval["mean"] < interval["high"]


def test_a_run_is_simulated_to_its_end(files: Path) -> None:
    found = answer("--until-done")["outcomes"][0]["histories"][0]
    assert found["finished"]
    assert found["tokens"] == pytest.approx(4000 * 32 * 512)


@pytest.mark.parametrize(("seconds", "join"), [(0.0, None), (600.0, None), (600.0, 600.0)], ids=str)
def test_a_trace_without_a_node_is_refused(files: Path, seconds: float, join: float | None) -> None:
    events = [] if join is None else [TraceEvent(join, "join", "n0", value=1.0)]
    stream = EventStream(TraceHeader("x", seconds=seconds), tuple(events))
    (files / "t.jsonl").write_text("\n".join(format_stream(stream)) + "\n")
    refused = within("simulate", "run.yaml", "--cluster", "machines.yaml", "--trace", "t.jsonl")
    refused.refuses("t.jsonl: no node is there before the trace ends; look at it")


def test_a_stretch_without_a_policy_that_uses_it_is_refused(files: Path) -> None:
    words = ("simulate", "run.yaml", "--cluster", "machines.yaml", "--make", "failures")
    within(*words, "--set", "stretch=1.5").refuses("carbon-pause")
    within(*words, "--set", "stretch=0.5", "--policy", "carbon-cap").refuses("1 or more")


def test_a_made_trace_needs_no_file(files: Path) -> None:
    words = ["simulate", "run.yaml", "--cluster", "machines.yaml", "--make", "spot", "--json"]
    made = within(*words, "--days", "0.2", "--set", "between_s=900", "--seeds", "2").succeeds()
    one, two = json.loads(made.out)["outcomes"][0]["histories"]
    assert one["interruptions"] != two["interruptions"] or one["tokens"] != two["tokens"]


def test_a_made_trace_has_the_losses_of_the_cluster_file(files: Path) -> None:
    def losses(per_day: float, *more: str) -> int:
        given = f"    losses_per_day: {per_day}\n"
        (files / "machines.yaml").write_text(MACHINES + given)
        words = ["simulate", "run.yaml", "--cluster", "machines.yaml", "--make", "failures"]
        made = within(*words, "--days", "20", "--json", *more).succeeds()
        count: int = json.loads(made.out)["outcomes"][0]["histories"][0]["interruptions"]
        return count

    assert losses(0.05) < losses(1.0) / 5
    assert losses(1.0, "--set", "per_node_year=9") < losses(1.0) / 5


def test_notices_spare_work(files: Path) -> None:
    found = answer("--sweep", "notice_s=0,60", "--set", "replicas_go_on=0")
    without, noticed = (outcome["histories"][0] for outcome in found["outcomes"])
    assert without["interruptions"] == 2
    assert noticed["interruptions"] == 0


def compared(one: str, other: str) -> dict[str, Any]:
    shown = within("report", one, "--compare", other, "--json").succeeds()
    value: dict[str, Any] = json.loads(shown.out)
    return value


def test_two_simulated_runs_side_by_side(files: Path) -> None:
    continues = answer("--out", "continues")["outcomes"][0]["histories"][0]
    restores = ("--set", "replicas_go_on=0", "--set", "peers=0", "--set", "store_interval_s=97")
    loses = answer(*restores, "--out", "loses")["outcomes"][0]["histories"][0]
    found = compared("continues", "loses")
    one, other = found["runs"]
    assert [run["is_simulated"] for run in found["runs"]] == [True, True]
    for run, ledger in ((one, continues), (other, loses)):
        assert run["usd"] == ledger["usd"]
        assert run["tokens"] == pytest.approx(ledger["tokens"], rel=1e-3)
        assert run["interruptions"] == ledger["interruptions"] == 2
        assert sum(run["seconds"].values()) == pytest.approx(ledger["wall_seconds"])
    assert (one["by_rung"], other["by_rung"]) == ({"0": 2}, {"6": 2})
    assert one["lost_steps"] == 0 < other["lost_steps"]
    assert other["rpo_s"]["worst"] == pytest.approx(loses["rpo_seconds"]["worst"], abs=0.1)
    differences = found["differences"]
    assert differences["tokens"] == other["tokens"] - one["tokens"] < 0
    labels = [value for name, value in differences.items() if name.startswith("seconds.")]
    assert sum(labels) == pytest.approx(differences["wall_s"], abs=1e-6)
    first = found["first_differing_decision"]
    assert first["index"] == 2  # both start; the first loss is answered by another rung
    assert (first["one"]["rung"], first["other"]["rung"]) == (0, 6)
    assert compared("loses", "loses")["first_differing_decision"] is None


def test_a_real_run_beside_a_simulated_one(files: Path) -> None:
    golden = Path(__file__).parents[2] / "golden" / "runs" / "nodes"
    shutil.copytree(golden, "real")
    simulate("--out", "simulated").succeeds()
    report = json.loads(within("report", "real", "--json").succeeds().out)
    found = compared("real", "simulated")
    real, simulated = found["runs"]
    assert (real["is_simulated"], simulated["is_simulated"]) == (False, True)
    assert real["seconds"] == report["seconds_by_class"]
    assert real["tokens"] == report["tokens"]
    broke = [incident for incident in report["incidents"] if not incident["planned"]]
    assert real["interruptions"] == len(broke) == 3
    assert real["rto_s"]["worst"] == max(incident["seconds"] for incident in broke)
    assert real["usd"] is None
    assert "usd" not in found["differences"]
    first = found["first_differing_decision"]
    assert (first["index"], first["one"]["nodes"], first["other"]["nodes"]) == (1, 2, 4)
    shown = within("report", "real", "--compare", "simulated").succeeds().out
    assert "A: real: golden, real, finished" in shown
    assert "membership 1 (start): no recovery, 2 nodes" in shown


PRICES = "date,machine_type,region,usd_per_hour_spot\n"


def test_prices_of_another_file_hold_for_the_nodes(files: Path) -> None:
    rows = "2024-01-01,g,east,5\n2024-01-01,g,west,7\n2025-01-01,g,west,7\n"
    Path("prices.csv").write_text(PRICES + rows)
    table = ("--trace", "prices.csv", "--gpu", "g", "--zone")
    east, west = (answer(*table, zone)["outcomes"][0]["histories"][0] for zone in ("east", "west"))
    for each in (east, west):
        assert each["wall_seconds"] == pytest.approx(3600)  # a year of prices adds no time
    assert east["usd"] == pytest.approx(5 * east["node_hours"])
    assert west["usd"] == pytest.approx(7 * west["node_hours"])
    Path("prices.csv").write_text(PRICES + rows.splitlines()[0] + "\n")
    (only,) = answer("--trace", "prices.csv")["outcomes"]  # one place holds everywhere
    assert only["histories"][0]["usd"] == pytest.approx(5 * east["node_hours"])


def test_a_journal_prices_the_rungs_that_its_run_took(files: Path) -> None:
    """The golden run took 0.3 s on rung 0; the kept price is 0.055 s."""
    golden = Path(__file__).parents[2] / "golden/runs/nodes"
    kept, priced = answer(), answer("--journal", str(golden))
    one, other = (found["outcomes"][0]["histories"][0] for found in (kept, priced))
    assert other["seconds_by_class"]["recovery"] > one["seconds_by_class"]["recovery"]


# --- Ctrl-C in a study ----------------------------------------------------------------------------
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
def test_an_interrupted_simulation_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = simulate("--json", *STUDY).succeeds().out
    with monkeypatch.context() as patch:
        press_in(patch, study_replays, "run_case", 3)
        stopped = simulate("--json", *STUDY, "--out", "made")
    told = "holdfast simulate: interrupted; 2 of 4 replays are kept in made; "
    assert stopped.code == 130
    assert stopped.err.endswith(f"{told}the same command continues\n")
    with Path("made/replays.jsonl").open("a") as lines:
        lines.write('{"key": "cut')  # as a kill in the middle of a line leaves it
    calls = press_in(monkeypatch, study_replays, "run_case")
    again = simulate("--json", *STUDY, "--out", "made").succeeds()
    assert (calls.number, again.out) == (2, fresh)
    assert "2 of 4 replays were kept in made" in again.err
    assert json.loads(Path("made/simulated.json").read_text())["policy"] == "holdfast"


@pytest.mark.usefixtures("files")
def test_what_an_interrupted_first_replay_left_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        press_in(patch, study_replays, "run_case", 1)
        stopped = simulate("--out", "made")
    assert stopped.code == 130
    assert stopped.err.endswith("interrupted; no replay was complete\n")
    assert Path("made/resolved.json").exists()
    assert not Path("made/simulated.json").exists()
    simulate("--out", "made").succeeds()
    assert json.loads(Path("made/simulated.json").read_text())["interruptions"] == 2


@pytest.mark.usefixtures("files")
def test_other_inputs_use_nothing_that_was_kept() -> None:
    simulate("--out", "made").succeeds()
    kept = Path("made/replays.jsonl").read_text()
    for name, old, new in (
        ("run.yaml", "batch_size: 32", "batch_size: 64"),
        ("nodes.csv", "3600000,add", "3700000,add"),
        ("machines.yaml", "usd_per_hour: 2", "usd_per_hour: 3"),
    ):
        content = Path(name).read_text()
        Path(name).write_text(content.replace(old, new))
        simulate("--out", "made").refuses("a study continues only with the same run file")
        Path(name).write_text(content)
    assert Path("made/replays.jsonl").read_text() == kept


def test_an_interrupted_admission_study_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = str(tmp_path / "made")
    words = ["simulate", "admission", "--cluster", "4x8xA100-80", "--days", "1", "--json"]
    words += ["--policy", "gang", "--policy", "pods", "--seeds", "2"]
    fresh = within(*words).succeeds().out
    with monkeypatch.context() as patch:
        press_in(patch, admission_study, "admit_jobs", 4)
        stopped = within(*words, "--out", out)
    assert (stopped.code, f"3 of 4 replays are kept in {out}" in stopped.err) == (130, True)
    calls = press_in(monkeypatch, admission_study, "admit_jobs")
    again = within(*words, "--out", out).succeeds()
    assert (calls.number, again.out) == (1, fresh)
    assert within(*words, "--load", "0.5", "--out", out).succeeds().out != fresh
    assert calls.number == 5

"""`holdfast simulate admission` from outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from holdfast_lab.admission.jobs import read_jobs
from tests.support.commands import within

JOBS = """\
team,submit_s,pods,devices,seconds,min_pods
red,0,2,8,7200,1
red,0,2,8,7200,
blue,600,1,8,3600,
blue,20000,1,2,600,
"""


@pytest.fixture
def jobs(tmp_path: Path) -> str:
    path = tmp_path / "jobs.csv"
    path.write_text(JOBS)
    return str(path)


def gangs(jobs: str, *more: str) -> dict[str, Any]:
    """The answer of a study with the policy `gang`."""
    words = ["--jobs", jobs, "--cluster", "4x8xA100-80", "--seeds", "1", "--json"]
    shown = within("simulate", "admission", "--policy", "gang", *more, *words).succeeds()
    value: dict[str, Any] = json.loads(shown.out)
    return value


def test_one_command_writes_table_charts_and_the_jobs_again(jobs: str, tmp_path: Path) -> None:
    out = tmp_path / "study"
    words = ["simulate", "admission", "--jobs", jobs, "--cluster", "4x8xA100-80"]
    printed = within(*words, "--seeds", "2", "--out", out).succeeds().out
    for part in ("wait, mean, h", "waiting for collectives", "waiting for stragglers", "Jain"):
        assert part in printed
    for name in ("hours", "waits", "teams"):
        root = ElementTree.fromstring((out / f"{name}.svg").read_text())
        words_in = "".join(root.itertext())
        assert "elastic" in words_in
        assert "topology" in words_in
    assert read_jobs((out / "jobs.csv").read_text(), "again") == read_jobs(JOBS, "first")
    assert json.loads((out / "admission.json").read_text())["seeds"] == [0, 1]


def test_json_has_every_figure_of_the_policies_asked_for(jobs: str) -> None:
    found = gangs(jobs, "--policy", "elastic")
    assert list(found["policies"]) == ["gang", "elastic"]
    assert found["teams"] == {"blue": 16, "red": 16}
    for policy in found["policies"].values():
        assert set(policy["figures"]) == set(found["meaning"])
        assert sum(each["mean"] for each in policy["share_of_held"].values()) == pytest.approx(1)
    # Blue's job takes its quota back: a gang is evicted, and an elastic one shrinks.
    assert found["policies"]["gang"]["figures"]["evictions"]["mean"] == 1
    assert found["policies"]["elastic"]["figures"]["evictions"]["mean"] == 0
    assert found["policies"]["elastic"]["figures"]["resizes"]["mean"] >= 1


def test_hard_quotas_lend_nothing(jobs: str) -> None:
    found = gangs(jobs, "--quotas", "hard")["policies"]["gang"]
    assert found["figures"]["evictions"]["mean"] == 0
    assert found["team_wait_h"]["red"]["mean"] == pytest.approx(1.0, rel=0.1)


def test_a_line_that_cannot_be_is_refused_with_its_place(jobs: str) -> None:
    Path(jobs).write_text(JOBS + "blue,800,two,8,60,\n")
    within("simulate", "admission", "--jobs", jobs).refuses(
        "jobs.csv:6: pods is 'two'; write a whole number, 1 or more"
    )


# --- `holdfast simulate mix` from outside ---------------------------------------------------------
def zone(folder: Path, name: str, counts: list[int]) -> str:
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 900}, "data": counts}))
    return f"{name}={path}"


def test_it_names_the_cheapest_mix(tmp_path: Path):
    first = zone(tmp_path, "us-east-1c", [1, 1, 1, 0] * 60)
    second = zone(tmp_path, "us-east-1d", [1, 0, 1, 1] * 60)
    given = ["--work", "20", "--nodes", "2", "--deadline", "14", "--on-demand", "3"]
    zones = ["--zone", first, "--zone", second, "--spot", "us-east-1=0.9", "--replays", "10"]
    found = json.loads(within("simulate", "mix", *zones, *given, "--json").succeeds().out)
    assert found["best"]["in_time"] >= 0.95
    assert found["best"]["usd"] < 0.8 * found["on_demand"]["usd"]
    assert "cheapest of" in within("simulate", "mix", *zones, *given).succeeds().err


def test_without_spot_nodes_it_takes_on_demand_nodes(tmp_path: Path):
    never = zone(tmp_path, "us-east-1c", [0] * 240)
    given = ["--work", "20", "--nodes", "2", "--deadline", "10.1", "--on-demand", "3"]
    options = ["--spot", "us-east-1=0.9", "--change", "0", "--replays", "5"]
    shown = within("simulate", "mix", "--zone", never, *given, *options).succeeds()
    assert "no spot" in shown.out

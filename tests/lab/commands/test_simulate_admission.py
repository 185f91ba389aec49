"""`holdfast simulate admission` from outside."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from holdfast.cli.main import main
from holdfast_lab.admission.jobs import read_jobs

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


def test_one_command_writes_table_charts_and_the_jobs_again(
    jobs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "study"
    words = ["simulate", "admission", "--jobs", jobs, "--cluster", "4x8xA100-80"]

    assert main([*words, "--seeds", "2", "--out", str(out)]) == 0

    printed = capsys.readouterr().out
    for part in ("wait, mean, h", "waiting for collectives", "waiting for stragglers", "Jain"):
        assert part in printed
    for name in ("hours", "waits", "teams"):
        root = ElementTree.fromstring((out / f"{name}.svg").read_text())
        words_in = "".join(root.itertext())
        assert "elastic" in words_in
        assert "topology" in words_in
    assert read_jobs((out / "jobs.csv").read_text(), "again") == read_jobs(JOBS, "first")
    assert json.loads((out / "admission.json").read_text())["seeds"] == [0, 1]


def test_json_has_every_figure_of_the_policies_asked_for(
    jobs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--jobs", jobs, "--cluster", "4x8xA100-80", "--seeds", "1", "--json"]

    assert main(["simulate", "admission", "--policy", "gang", "--policy", "elastic", *words]) == 0

    found = json.loads(capsys.readouterr().out)
    assert list(found["policies"]) == ["gang", "elastic"]
    assert found["teams"] == {"blue": 16, "red": 16}
    for policy in found["policies"].values():
        assert set(policy["figures"]) == set(found["meaning"])
        assert sum(each["mean"] for each in policy["share_of_held"].values()) == pytest.approx(1)
    # Blue's job takes its quota back: a gang is evicted, and an elastic one shrinks.
    assert found["policies"]["gang"]["figures"]["evictions"]["mean"] == 1
    assert found["policies"]["elastic"]["figures"]["evictions"]["mean"] == 0
    assert found["policies"]["elastic"]["figures"]["resizes"]["mean"] >= 1


def test_hard_quotas_lend_nothing(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--jobs", jobs, "--cluster", "4x8xA100-80", "--seeds", "1", "--json"]

    assert main(["simulate", "admission", "--policy", "gang", "--quotas", "hard", *words]) == 0

    found = json.loads(capsys.readouterr().out)["policies"]["gang"]
    assert found["figures"]["evictions"]["mean"] == 0
    assert found["team_wait_h"]["red"]["mean"] == pytest.approx(1.0, rel=0.1)


def test_a_line_that_cannot_be_is_refused_with_its_place(
    jobs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(jobs).write_text(JOBS + "blue,800,two,8,60,\n")

    assert main(["simulate", "admission", "--jobs", jobs]) == 2

    assert "jobs.csv:6: pods is 'two'; write a whole number, 1 or more" in capsys.readouterr().err

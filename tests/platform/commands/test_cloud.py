"""`holdfast cloud`: prices, mixes and jobs of services, as a person calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import within, write_run_file


def test_offers_are_listed_with_prices_and_dates() -> None:
    done = within("cloud", "offers", "--accelerator", "H100", "--json")
    rows = json.loads(done.out)
    assert {row["accelerator"] for row in rows} == {"H100"}
    per_speed = [row["spot"] / row["tflops"] for row in rows]
    assert per_speed == sorted(per_speed)
    assert all(row["date"] >= "2025-01-01" for row in rows)


def test_the_table_has_a_row_for_each_type() -> None:
    table = within("cloud", "offers").out
    rows = json.loads(within("cloud", "offers", "--json").out)
    assert table.count("\n") == len(rows) + 1


def test_a_deadline_makes_the_mix_dearer_and_is_met() -> None:
    asked = ("cloud", "mix", "--work", "200", "--nodes", "8", "--accelerator", "H100", "--json")
    free = json.loads(within(*asked, "--spot", "4").out)[0]
    late = json.loads(within(*asked, "--spot", "4", "--finish-by", "30").out)[0]
    assert sum(free["nodes"].values()) == 8
    assert late["hours"] <= 30
    few = within(*asked, "--spot", "4", "--finish-by", "20")
    assert few.code == 1


def test_a_catalogue_of_ones_own_takes_the_place_of_the_table(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    head = "cloud,region,type,accelerator,count,tflops,on_demand,spot,reclaimed_per_month,date\n"
    path.write_text(f"{head}lab,here,box,RTX,2,100,1.5,0.5,0.1,2026-01-01\n")
    rows = json.loads(within("cloud", "offers", "--catalogue", path, "--json").out)
    assert [row["type"] for row in rows] == ["box"]
    path.write_text(f"{head}lab,here,box,RTX,2,100,free,0.5,0.1,2026-01-01\n")
    done = within("cloud", "offers", "--catalogue", path)
    assert done.code == 2
    assert f"{path}:2" in done.err


SKYPILOT = ("--for", "skypilot", "--image", "x", "--region")


def test_a_node_has_a_place_for_each_accelerator(tmp_path: Path) -> None:
    run = write_run_file(tmp_path).with_name("open.yaml")
    run.write_text("train: {batch_size: 16}\n")
    asked = ("cloud", "spec", run, "folder=s3://b/r", "--for", "skypilot", "--image", "x")
    assert "cluster.places=8" in within(*asked, "--count", "8").out
    assert "cluster.places=1" in within(*asked).out
    assert "cluster.places=2" in within(*asked, "cluster.places=2", "--count", "8").out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("offers", "--accelerator", "TPU"), "--accelerator"),
        (("mix", "--work", "inf", "--nodes", "2"), "--work"),
        (("mix", "--work", "5", "--nodes", "2", "--least", "3"), "--least"),
        (("spec", "{run}", "--for", "heroku"), "--for"),
        (("spec", "{run}", "--for", "vertex", "--image", "x"), "--secret"),
        (("spec", "{run}", "--for", "skypilot", "--image", "x"), "folder"),
        (
            ("spec", "{run}", "governance.regions=[eu-west-1]", *SKYPILOT, "us-east-1"),
            "lies in us-east-1",
        ),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    run = write_run_file(tmp_path)
    done = within("cloud", *(word.format(run=run) for word in words))
    assert done.code == 2
    assert said in done.err
    assert done.err.count("\n") == 1


FOLLOW = ("--work", "1", "--image", "ami-1", "--secret", "s", "--region", "us-east-1")


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (("--machine", "no.such"), "--machine"),
        (("--machine", "p5.48xlarge", "--region", "xx-none-1"), "--region"),
        (("--machine", "p5.48xlarge", "--least", "3"), "--least"),
        (("--machine", "p5.48xlarge"), "folder"),
    ],
)
def test_what_cannot_be_followed_is_refused_before_an_order(
    words: tuple[str, ...], place: str, tmp_path: Path
) -> None:
    within("cloud", "follow", write_run_file(tmp_path), *FOLLOW, *words).refuses(place)

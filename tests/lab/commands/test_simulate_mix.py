"""`holdfast simulate mix` from outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.cli.main import main


def zone(folder: Path, name: str, counts: list[int]) -> str:
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 900}, "data": counts}))
    return f"{name}={path}"


def test_it_names_the_cheapest_mix(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first = zone(tmp_path, "us-east-1c", [1, 1, 1, 0] * 60)
    second = zone(tmp_path, "us-east-1d", [1, 0, 1, 1] * 60)
    given = ["--work", "20", "--nodes", "2", "--deadline", "14", "--on-demand", "3"]
    zones = ["--zone", first, "--zone", second, "--spot", "us-east-1=0.9", "--replays", "10"]
    assert main(["simulate", "mix", *zones, *given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["in_time"] >= 0.95
    assert found["best"]["usd"] < 0.8 * found["on_demand"]["usd"]
    assert main(["simulate", "mix", *zones, *given]) == 0
    assert "cheapest of" in capsys.readouterr().err


def test_without_spot_nodes_it_takes_on_demand_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    never = zone(tmp_path, "us-east-1c", [0] * 240)
    given = ["--work", "20", "--nodes", "2", "--deadline", "10.1", "--on-demand", "3"]
    options = ["--spot", "us-east-1=0.9", "--change", "0", "--replays", "5"]
    assert main(["simulate", "mix", "--zone", never, *given, *options]) == 0
    assert "no spot" in capsys.readouterr().out

"""`holdfast scale`: the curve over devices, its knee, and what it does not know."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from holdfast.cli.main import main
from tests.support.ranks import ROOT

RUN = str(ROOT / "examples" / "spot-losses" / "run.yaml")
PRICED = ["--cluster", "1xaws/us-east-1/p5.48xlarge", "--most", "256"]


def test_the_curve_marks_the_knee_and_the_layout_that_moves_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg = tmp_path / "scale.svg"
    assert main(["scale", RUN, *PRICED, "--json", "--svg", str(svg)]) == 0
    value = json.loads(capsys.readouterr().out)
    points = value["points"]
    assert [point["devices"] for point in points] == [8, 16, 32, 64, 128, 256]
    assert points[0]["efficiency"] == 1
    for point in points:
        assert 0 <= point["exposed"] + point["bubble"] < 1
        assert 0 < point["available"] <= 1.001
        assert point["usd"] > 0
    knee, kept = value["knee"], value["knee_with_degrees_kept"]
    assert kept <= knee
    at = {point["devices"]: point["tokens_per_s"] for point in points}
    assert all(at[2 * n] >= 1.5 * at[n] for n in at if n < knee)
    assert knee == 256 or at[2 * knee] < 1.5 * at[knee]
    texts = [each.text for each in ElementTree.parse(svg).iter() if each.tag.endswith("text")]
    assert ("knee" in texts) == (knee != 256)  # larger sizes were not searched
    assert "exposed communication" in texts


def test_dollars_without_a_price_are_left_out_and_the_pool_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["scale", RUN, "--cluster", "1x8xH100-80", "--most", "16"]) == 0
    out = capsys.readouterr().out
    assert "no price is known of H100-80: dollars are left out" in out
    assert "no knee up to 16 devices" in out


def test_degrees_that_are_given_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [RUN, "layout.tp=8", "--cluster", "1x8xH100-80", "--most", "16", "--json"]
    assert main(["scale", *asked]) == 0
    value = json.loads(capsys.readouterr().out)
    degrees = [point["choice"]["replicas"][0]["tp"] for point in value["points"] + value["kept"]]
    assert set(degrees) == {8}


def test_a_drawing_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = ["--most", "8", "--svg", str(tmp_path / "none" / "scale.svg")]
    assert main(["scale", RUN, *drawn]) == 2
    assert "it cannot be written" in capsys.readouterr().err


def test_a_model_that_fits_on_no_size_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [RUN, "model.preset=llama3.1-405b", "--cluster", "1x8xV100-16", "--most", "8"]
    assert main(["scale", *asked]) == 2
    assert "no size has a layout: " in capsys.readouterr().err

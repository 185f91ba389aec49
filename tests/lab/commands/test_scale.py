"""`holdfast scale`: the curve over devices, its knee, and what it does not know."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from holdfast_lab.claims.claims import MODELS, VERDICTS, Claim, load_claims
from tests.support.commands import within
from tests.support.ranks import ROOT

RUN = str(ROOT / "examples" / "spot-losses" / "run.yaml")
PRICED = ["--cluster", "1xaws/us-east-1/p5.48xlarge", "--most", "256"]


def test_the_curve_marks_the_knee_and_the_layout_that_moves_it(tmp_path: Path) -> None:
    svg = tmp_path / "scale.svg"
    value = json.loads(within("scale", RUN, *PRICED, "--json", "--svg", svg).succeeds().out)
    points = value["points"]
    assert [point["devices"] for point in points] == [8, 16, 32, 64, 128, 256]
    assert points[0]["efficiency"] <= 1
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


def test_dollars_without_a_price_are_left_out_and_the_pool_is_named() -> None:
    out = within("scale", RUN, "--cluster", "1x8xH100-80", "--most", "16").succeeds().out
    assert "no price is known of H100-80: dollars are left out" in out
    assert "no knee up to 16 devices" in out


def test_devices_that_the_fastest_layout_leaves_idle_are_named() -> None:
    asked = [RUN, "train.batch_size=4", "layout.tp=8", "layout.cp=1", "--cluster", "1x8xH100-80"]
    out = within("scale", *asked, "--most", "64").succeeds().out
    (most,) = (line for line in out.splitlines() if line.startswith("64 "))
    assert most.endswith("32 used")
    assert "They replace lost nodes" in out


def test_degrees_that_are_given_are_kept() -> None:
    asked = [RUN, "layout.tp=8", "--cluster", "1x8xH100-80", "--most", "16", "--json"]
    value = json.loads(within("scale", *asked).succeeds().out)
    degrees = [point["choice"]["replicas"][0]["tp"] for point in value["points"] + value["kept"]]
    assert set(degrees) == {8}


def test_a_drawing_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    drawn = ["--most", "8", "--svg", str(tmp_path / "none" / "scale.svg")]
    within("scale", RUN, *drawn).refuses_last("it cannot be written")


def test_a_model_that_fits_on_no_size_is_one_sentence() -> None:
    asked = [RUN, "model.preset=llama3.1-405b", "--cluster", "1x8xV100-16", "--most", "8"]
    within("scale", *asked).refuses_last("no size has a layout: ")


def test_the_hundredfold_is_one_number() -> None:
    """`layout distance` and `claims` say the same limit of H100."""
    machines = ["--cluster", "8x8xH100-80"]
    said = within("layout", "distance", "--ranks", "8", "--size", "100663296", *machines, "--json")
    rows = {row["level"]: row for row in json.loads(said.succeeds().out)}
    assert f" {rows['rack']['hundredfold_gbit_s']:.0f} Gbit/s" in MODELS["tp_over_nodes"]().ours


# --- `holdfast claims` ----------------------------------------------------------------------------
CLAIMS = load_claims()


@pytest.mark.parametrize("claim", [each for each in CLAIMS if each.basis == "measured"], ids=str)
def test_a_measured_value_stands_on_its_page_with_its_command(claim: Claim) -> None:
    """The row that has the evidence names the command, or a row above does and this says the
    same."""
    lines = (ROOT / claim.page).read_text("utf-8").splitlines()
    at = [index for index, line in enumerate(lines) if claim.evidence in line]
    assert len(at) == 1
    index = at[0]
    while "the same" in lines[index] and claim.command not in lines[index]:
        index -= 1
    assert claim.command.split(" --")[0] in lines[index]


def test_every_model_is_a_row_and_every_row_has_a_verdict() -> None:
    rows = [claim for claim in CLAIMS if claim.basis == "modelled"]
    assert {claim.evidence for claim in rows} == set(MODELS)
    assert all(claim.verdict in VERDICTS and claim.ours for claim in CLAIMS)
    verdicts = {claim.evidence: claim.verdict for claim in rows}
    assert verdicts["bubble_1f1b"] == verdicts["bubble_zb_h1"] == "as claimed"
    assert verdicts["bubble_zbv"] == "worse"
    assert verdicts["llama3_goodput"] == "better"


def test_the_command_prints_all_and_says_what_does_not_hold() -> None:
    text = within("claims").succeeds().out
    failed = text.split("Here worse:")[1]
    for claim in CLAIMS:
        assert claim.claim in text
        if claim.verdict == "worse":
            assert claim.claim in failed
    assert len(json.loads(within("claims", "--json").succeeds().out)) == len(CLAIMS)

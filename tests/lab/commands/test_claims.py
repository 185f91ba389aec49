"""`holdfast claims`: each value can be traced, and a claim that does not hold is said."""

from __future__ import annotations

import json

import pytest

from holdfast.cli.main import main
from holdfast_lab.claims.claims import MODELS, VERDICTS, Claim, load_claims
from tests.support.ranks import ROOT

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
    assert verdicts["bubble_1f1b"] == verdicts["bubble_zb_h1"] == "holds"
    assert verdicts["bubble_zbv"] == "does not hold"


def test_the_command_prints_all_and_says_what_does_not_hold(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["claims"]) == 0
    text = capsys.readouterr().out
    failed = text.split("Claims that do not hold here:")[1]
    for claim in CLAIMS:
        assert claim.claim in text
        if claim.verdict == "does not hold":
            assert claim.claim in failed
    assert main(["claims", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(CLAIMS)

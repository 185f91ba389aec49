"""Claims of surveys and papers, next to what was measured here or what the model says.

`claims.csv` has the claims. A measured row names a page of docs, the text there that proves it, and
the command that measured it. A modelled row names a function of `claim_models.py`, which computes
the value and the verdict when it is asked.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from holdfast_lab.claims.claim_models import MODELS

CLAIMS_FILE = Path(__file__).with_name("claims.csv")
Verdict = Literal["holds", "does not hold", "not comparable", "not measured"]
VERDICTS: tuple[Verdict, ...] = ("holds", "does not hold", "not comparable", "not measured")


@dataclass(frozen=True)
class Claim:
    """One row. ours: the value here, and why the verdict is what it is. basis: measured, modelled
    or not measured. evidence: text of the page that has the number, or the model's name."""

    topic: str
    claim: str
    source: str
    claimed: str
    basis: str
    page: str
    evidence: str
    command: str
    verdict: Verdict
    ours: str


def load_claims() -> tuple[Claim, ...]:
    """All claims in the order of the file, the modelled ones computed."""
    with CLAIMS_FILE.open(encoding="utf-8", newline="") as file:
        return tuple(_claim(row) for row in csv.DictReader(file))


def _claim(row: dict[str, str]) -> Claim:
    verdict, ours, command = row["verdict"], row["why"], row["command"]
    if row["basis"] == "modelled":
        said = MODELS[row["evidence"]]()
        verdict, ours, command = said.verdict, said.ours, "holdfast claims"
    return Claim(
        row["topic"],
        row["claim"],
        row["source"],
        row["claimed"],
        row["basis"],
        row["page"],
        row["evidence"],
        command,
        cast("Verdict", verdict),
        ours,
    )

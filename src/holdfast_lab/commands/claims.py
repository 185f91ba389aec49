"""`holdfast claims`: what surveys claim, next to what was measured here or what the model says."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.show.output import print_json, print_table
from holdfast_lab.claims.claims import VERDICTS, Claim, load_claims

app = make_app("Show claims of surveys and papers next to what was measured or modelled here.")


@app.command()
def claims(json: Annotated[bool, typer.Option("--json", help="print JSON")] = False) -> None:
    """Print each claim with its source, the value here, and whether that is better or worse.

    Each verdict has the assumption that decides it. "not comparable": the sizes or machines differ.

    Measured values come from docs/log/measurements.md, with their command. They are of small models
    on two CPU cores, unless the row says otherwise. Modelled values are computed when you ask.

    \b
    Example:
      holdfast claims
      holdfast claims --json
    """
    found = load_claims()
    if json:
        print_json([asdict(claim) for claim in found])
        return
    for topic in dict.fromkeys(claim.topic for claim in found):
        print(f"{topic}:")
        print_table([_row(claim) for claim in found if claim.topic == topic])
        print()
    for verdict in ("worse", "not comparable"):
        print(f"Here {verdict}:")
        for claim in (each for each in found if each.verdict == verdict):
            print(f"  {claim.claim} ({claim.source}): {claim.ours}")
        print()
    numbers = (f"{sum(c.verdict == verdict for c in found)} {verdict}" for verdict in VERDICTS)
    print(f"{len(found)} claims: {', '.join(numbers)}")


def _row(claim: Claim) -> list[str]:
    by = f"[{claim.command}]" if claim.basis == "measured" else f"[{claim.basis}]"
    return [
        f"  {claim.verdict}",
        f"{claim.claim} ({claim.source}: {claim.claimed})",
        f"{claim.ours} {by}",
    ]

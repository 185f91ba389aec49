"""`holdfast doctor`: can this machine train?"""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.doctor_checks import run_checks
from holdfast.cli.output import print_json, print_table

app = make_app("Check that this machine can train.")


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> int:
    """Look at cores, memory, disk, Python, torch, the network's loopback and the clock.

    Exit code 1 when something would stop a run; each such line names a remedy.

    \b
    Example:
      holdfast doctor
      holdfast doctor --json
    """
    checks = run_checks()
    if json:
        print_json([check.to_json() for check in checks])
    else:
        print_table(
            [(c.mark, c.name, c.found + (f": {c.remedy}" if c.remedy else "")) for c in checks]
        )
    return 1 if any(check.state == "fails" for check in checks) else 0

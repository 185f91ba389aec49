"""`holdfast doctor`: can this machine train, and how is a run?"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import Json, Overrides, named_argument, refuse_beside
from holdfast.cli.table import all_commands
from holdfast.doctor.checks import run_checks, run_version_checks
from holdfast.errors import UserError
from holdfast.show.output import print_json, print_table, say

app = make_app("Check that this machine can train, or look at a run.")


@app.command()
def doctor(
    run: Annotated[
        str | None, typer.Argument(help="run folder or bucket, or its run file; none: this machine")
    ] = None,
    overrides: Overrides = None,
    ready: Annotated[
        bool, typer.Option("--ready", help="of a run file: disturb a small copy of its run")
    ] = False,
    key: Annotated[
        Path | None, typer.Option(help="with --ready: private key (PEM) that signs the result")
    ] = None,
    json: Json = False,
) -> int:
    """Look at this machine: cores, memory, disk, Python, torch, the loopback network, the clock.

    With RUN, look at a run that trains, has ended or is broken. It shows the last step and
    checkpoint, the nodes and the links between them. It tries what the run store can do and how
    fast, and whether memory and disk suffice. Nothing of the run changes; a probe is removed.

    With --ready, train a small copy of a run file's run. A worker is killed, the copy is stopped
    and resumed, its samples and checkpoints are checked, and an alert is posted to observe.webhook.
    The checklist is recorded, and signed with --key. key=value may follow the run file.

    Exit code 1 when something would fail; each such line names a remedy.

    \b
    Example:
      holdfast doctor
      holdfast doctor runs/quickstart
      holdfast doctor run.yaml --json
      holdfast doctor run.yaml --ready --key key.pem
    """
    if ready:
        return _check_ready(run, overrides, key, json=json)
    refuse_beside("no --ready", {"--key": key, "key=value": overrides})
    if run is None:
        checks = [*run_checks(), *run_version_checks()]
        if json:
            print_json([check.to_json() for check in checks])
        else:
            print_table([(each.mark, each.name, each.sentence) for each in checks])
        return 1 if any(check.state == "fails" for check in checks) else 0
    from holdfast.doctor.deadline import QUICK_S, Deadlines
    from holdfast.doctor.run import RunDiagnosis, diagnose_run, folder_of
    from holdfast.launch.run.holder import HolderWatch
    from holdfast.wire.store.run_location import location_of_run

    given = named_argument("run", run)  # a Path option would be looked for on its disk
    within = Deadlines(given)

    def find() -> tuple[Path, str]:
        folder = folder_of(given)
        return folder, location_of_run(os.path.abspath(folder))

    folder, place = within.run("run folder", QUICK_S, find, (None, os.path.abspath(given)))
    if folder is None:
        found = RunDiagnosis(given, within.hung)
    else:
        found = diagnose_run(folder, HolderWatch(folder, say))
    if json:
        print_json(found.to_json())
    else:
        print(place)
        print_table([(each.mark, each.name, each.sentence) for each in found.checks])
    return 1 if found.will_fail else 0


def _check_ready(
    run: str | None, overrides: list[str] | None, key: Path | None, *, json: bool
) -> int:
    """Have the platform check a run file. Raises UserError."""
    if run is None or not Path(run).is_file():
        raise UserError(
            "--ready checks a run file, and none is named",
            where="command line",
            remedy="write: holdfast doctor RUN_FILE --ready",
        )
    canary = all_commands().get("canary")
    if canary is None:
        raise UserError(
            "--ready is a part of holdfast_platform, which is not installed here",
            where="--ready",
            remedy="install all of Holdfast",
        )
    checked: int = import_module(canary.module).check_ready(Path(run), overrides, key, json=json)
    return checked

"""`holdfast canary`, and `holdfast doctor RUN_FILE --ready`: check-ups of a run file."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import Json, Overrides, RunFile, refuse_beside
from holdfast.config.loading.load import load_config
from holdfast.config.sections.run_place import is_bucket
from holdfast.errors import ConfigError
from holdfast.show.output import print_json, print_table, say
from holdfast_platform.governance.signing import find_program
from holdfast_platform.observe.canary import Canary, describe
from holdfast_platform.observe.ready import LEAST_STEPS, CheckUp

app = make_app("Check again and again whether a run file is ready for production.")

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
SIGNED = "record.sig"


def interval_s(text: str) -> float:
    """Return the seconds of an interval as 90s, 30m, 6h or 1d. Raises ConfigError."""
    if not (found := re.fullmatch(r"([1-9]\d{0,5})([smhd])", text)):
        raise ConfigError(
            f"{text!r} is no interval", where="--every", remedy="write a number and s, m, h or d"
        )
    return float(int(found[1]) * _UNITS_S[found[2]])


def make_canary(
    run_file: Path,
    overrides: list[str] | None,
    to: Path | None,
    key: Path | None,
    steps: int,
    patience_s: float,
    tell: Callable[[str], None],
    *,
    is_kept: bool = False,
) -> Canary:
    """Raises UserError for a run file that is wrong, and for a key that is not there."""
    loaded = load_config(run_file, overrides or [])
    if key is not None and not key.is_file():
        raise ConfigError("there is no such key", where=str(key), remedy="name a private key (PEM)")
    if key is not None:
        find_program(os.environ)
    config = loaded.config
    place = Path(config.name) if is_bucket(config.run_place) else Path(config.run_folder)
    folder = to or place.with_name(f"{place.name}.ready")
    return Canary(loaded, folder.absolute(), steps, patience_s, key, is_kept, tell)


def print_check_up(canary: Canary, found: CheckUp, *, json: bool) -> int:
    """Print the checklist. Return the exit code."""
    if json:
        print_json({**found.to_json(), "record": str(canary.folder), "signed": bool(canary.key)})
    else:
        print_table([(check.mark, check.name, check.sentence) for check in found.checks])
        signed = f", signed: {canary.folder / SIGNED}" if canary.key else ", not signed (--key)"
        say(f"{describe(found)}; recorded in {canary.folder / 'record'}{signed}")
    return 0 if found.is_ready else 1


@app.command()
def canary(
    run_file: RunFile,
    overrides: Overrides = None,
    every: Annotated[
        str, typer.Option(help="from the begin of a check-up to the next: 90s, 30m, 6h, 1d")
    ] = "6h",
    once: Annotated[bool, typer.Option("--once", help="one check-up, for cron")] = False,
    key: Annotated[
        Path | None, typer.Option("--key", help="private key (PEM): sign the record with it")
    ] = None,
    to: Annotated[
        Path | None, typer.Option(help="folder of the record; none: the run folder with .ready")
    ] = None,
    steps: Annotated[int, typer.Option(min=LEAST_STEPS, help="steps of the copy")] = 12,
    patience: Annotated[
        float, typer.Option(min=1.0, help="seconds without a sign of the copy: it is stuck")
    ] = 300.0,
    keep: Annotated[bool, typer.Option("--keep", help="keep the copy of a good check-up")] = False,
    json: Json = False,
) -> int:
    """Carry the check-up of 'holdfast doctor RUN_FILE --ready' out on a schedule.

    Each one is a line of a record that is only added to. A failure is posted to observe.webhook.
    Only one check-up is at work in a folder. Ctrl-C or SIGTERM ends it after the check-up that is
    under way. Exit code 0 if the last check-up was good, 1 if it failed, 2 if another process
    checks this run file now.

    \b
    Example:
      holdfast canary run.yaml --every 6h --key key.pem
      holdfast canary run.yaml --once
    """
    refuse_beside("no --once", {"--json": json and not once})
    seconds = interval_s(every)
    found = make_canary(run_file, overrides, to, key, steps, patience, say, is_kept=keep)
    if once:
        return print_check_up(found, found.run_once(), json=json)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return 0 if found.run_every(seconds, stop).is_ready else 1


def check_ready(
    run_file: Path, overrides: list[str] | None, key: Path | None, *, json: bool
) -> int:
    """Carry out `holdfast doctor RUN_FILE --ready`."""
    tell = (lambda line: None) if json else say
    found = make_canary(run_file, overrides, None, key, 12, 300.0, tell)
    return print_check_up(found, found.run_once(), json=json)

"""`holdfast dashboard`: a live page of a run, or of all runs in a folder."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import run_path
from holdfast.launch.run.holder import HolderWatch, is_holder_gone
from holdfast.launch.run.lora_run import describe_first_weights
from holdfast.launch.run.runs import RESOLVED_FILE, Run, open_run
from holdfast.report.dashboard.run_view import RunSource
from holdfast.report.live.background import FOLLOWER_NICENESS
from holdfast.show.output import print_line, say

app = make_app("Show runs in a browser while they train.")


@app.command()
def dashboard(
    run: Annotated[
        Path,
        typer.Argument(
            help="run folder or bucket, the run file it was started with, or a folder of runs",
            parser=run_path,
        ),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free one")] = 0,
    json: Annotated[bool, typer.Option("--json", help="print the address as JSON")] = False,
) -> int:
    """Serve a page about a run, or a table of the runs in a folder, until Ctrl-C.

    The page follows the journal: curve, nodes, use of time, incidents, cost. It changes nothing and
    loads nothing from other places. It listens on 127.0.0.1 alone; the printed address has a token.

    \b
    Example:
      holdfast dashboard runs/quickstart
      holdfast dashboard runs --port 8080
    """
    from holdfast.wire.http.asgi import require_web_packages, serve_asgi
    from holdfast.wire.http.sockets import bind_listener

    require_web_packages("holdfast dashboard", "dashboard")
    from holdfast.report.dashboard.app import make_app as make_web_app
    from holdfast.report.dashboard.follower import Dashboard

    if _runs_in(run) and not (run / RESOLVED_FILE).exists():
        board = Dashboard(lambda: _runs_in(run), is_single=False)
    else:
        source = source_of(open_run(run), run.name)
        board = Dashboard(lambda: {run.name: lambda: source}, is_single=True)
    os.nice(FOLLOWER_NICENESS)
    token = secrets.token_urlsafe(32)
    bound = bind_listener("127.0.0.1", port, "--port")
    address = f"http://127.0.0.1:{bound.getsockname()[1]}/?token={token}"
    board.start()
    if json:
        print_line({"address": address})
    else:
        say(f"open {address}\nCtrl-C ends the page, and no run")
    try:
        serve_asgi(make_web_app(board, token, bound.getsockname()[1]), bound, close_timeout_s=1)
    finally:
        board.close()
    return 0


def _runs_in(folder: Path) -> dict[str, Callable[[], RunSource]]:
    """Return by name what opens each run of a folder; none if it is no folder."""
    found = sorted(each.parent for each in folder.glob(f"*/{RESOLVED_FILE}"))
    return {each.name: partial(_open, each) for each in found}


def _open(folder: Path) -> RunSource:
    return source_of(open_run(folder), folder.name)


def source_of(run: Run, name: str) -> RunSource:
    """Return what the page needs to know of a run."""
    watch = HolderWatch(run.folder)
    return RunSource(
        name,
        run.place,
        run.store,
        run.config.train.steps,
        lambda: is_holder_gone(watch),
        describe_first_weights(run.config),
    )

"""`holdfast watch`: the view of a run that another process trains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.call import app as make_app
from holdfast.cli.runs import open_run

app = make_app("Follow a run from another terminal.")


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(help="run folder, or the run file it was started with")],
    json: Annotated[
        bool, typer.Option("--json", help="print the journal as JSON lines instead of a view")
    ] = False,
) -> None:
    """Show what a run does, from its beginning until it ends. Ctrl-C leaves; the run goes on.

    \b
    Example:
      holdfast watch runs/quickstart
      holdfast watch run.yaml --json
    """
    from holdfast.cli.views import record_line
    from holdfast.report import live
    from holdfast.report.progress import Progress
    from holdfast.report.timeline import in_order
    from holdfast.wire.journal import follow

    found = open_run(run)
    try:
        if json:
            progress = Progress(found.config.train.steps)
            for batch in follow(found.store):
                for record in in_order(batch):
                    print(record_line(record), flush=True)
                    progress.observe(record)
                if progress.ended:
                    return
        else:
            with live.View(found.config.train.steps) as view:
                live.watch(follow(found.store), view)
    except KeyboardInterrupt:
        return

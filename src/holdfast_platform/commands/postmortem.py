"""`holdfast postmortem`: a draft from a run's journal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import RunArgument
from holdfast.cli.read_errors import explain_read_errors
from holdfast.launch.run.runs import open_run
from holdfast.report.page.page import write_result
from holdfast.show.output import say
from holdfast.wire.journal import read_journal
from holdfast_platform.observe.postmortem import draft_postmortem

app = make_app("Draft a post-mortem of a run.")


@app.command()
def postmortem(
    run: RunArgument,
    to: Annotated[
        Path | None, typer.Option(help="where to write the draft; none: it is printed")
    ] = None,
) -> None:
    """Draft a post-mortem of a run as Markdown.

    It has the root event, a timeline, the repeated work, the cost and open questions. It comes from
    the journal alone, so the same journal gives the same bytes. What the journal does not say is a
    question at the end. Prices are those of the run's cluster file, if it has one.

    \b
    Example:
      holdfast postmortem runs/my-run
      holdfast postmortem runs/my-run --to postmortem.md
    """
    found = open_run(run)
    with explain_read_errors(found.place):
        text = draft_postmortem(read_journal(found.store))
    if to is None:
        print(text, end="")
        return
    write_result(to, text, "draft", "--to")
    say(f"wrote {to}")

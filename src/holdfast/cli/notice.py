"""`holdfast notice`: tell a run that machines are about to be lost."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import RunArgument
from holdfast.elastic.protocol.notice_messages import (
    NOTICE_PATH,
    EmergencyReply,
    Notice,
    UnknownNodeReply,
    notice_reply_from_json,
)
from holdfast.errors import HoldfastError, RunFolderError, UserError
from holdfast.launch.run.bucket_run import require_secret
from holdfast.launch.run.holder import HolderWatch
from holdfast.launch.run.runs import Run, open_run
from holdfast.show.output import print_json, say
from holdfast.wire.http.client import Client
from holdfast.wire.secret import SECRET_FILE_VARIABLE, open_secret
from holdfast.wire.term import newest_term, secret_of

app = make_app("Tell a run that machines are about to go.")


@app.command()
def notice(
    run: RunArgument,
    seconds: Annotated[float, typer.Option(help="until they are gone")],
    node: Annotated[
        list[str] | None, typer.Option(help="one that goes; may be repeated; none: all of them")
    ] = None,
    leave: Annotated[bool, typer.Option("--leave", help="the run is to stop by then")] = False,
    json: Annotated[bool, typer.Option("--json", help="print the plan as JSON")] = False,
) -> int:
    """Have a run that is at work save what will be complete in time, and with --leave, stop.

    If enough other nodes remain, they continue after a step without the nodes that are named. With
    --leave, the named nodes leave the run. Exit code 1 if nothing will be complete in time, by what
    was measured so far.

    \b
    Example:
      holdfast notice runs/quickstart --seconds 30 --leave
    """
    if not 0 < seconds < 1e6:
        raise UserError(
            f"a notice of {seconds:g} seconds makes no sense",
            where="--seconds",
            remedy="say in how many seconds the machines will be lost",
        )
    names = list(dict.fromkeys(node or ()))
    if "" in names:
        raise UserError(
            "a node without a name", where="--node", remedy="name one, or leave --node out: all"
        )
    found = open_run(run)
    require_secret(found.folder)
    if not HolderWatch(found.folder).look():
        raise RunFolderError(
            "nobody is training here, or on another machine, or with another secret than is known "
            "here",
            where=str(found.folder),
            remedy=(
                f"call this on the machine that trains, while it does, with "
                f"{SECRET_FILE_VARIABLE} as there"
            ),
        )
    plan = _post(found, Notice(seconds, tuple(names), leave))
    if isinstance(plan, UnknownNodeReply):
        raise UserError(plan.reason, where="--node", remedy=f"there are {', '.join(plan.nodes)}")
    if json:
        print_json(plan.to_json())
    else:
        say(plan.reason)
    return 0 if plan.tiers or plan.moves else 1


def _post(found: Run, notice: Notice) -> EmergencyReply | UnknownNodeReply:
    """Send the notice to the agent that leads the run; return the plan that it answers.

    Raises RunFolderError if the agent cannot be reached, or takes no notice now.
    """
    _, holder = newest_term(found.store)
    secret = secret_of(holder, open_secret(found.folder))
    client = Client(str((holder or {}).get("address", "")), secret)
    try:
        return notice_reply_from_json(client.post(NOTICE_PATH, notice.to_json()))
    except HoldfastError as error:
        raise RunFolderError(
            str(error), where=str(found.folder), remedy="call this while the run is at work"
        ) from error
    finally:
        client.close()

"""`holdfast host`: this machine runs programs for a controller."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.config.sections.peers import is_loopback
from holdfast.errors import UserError
from holdfast.launch.node.node_name import default_node_name
from holdfast.show.output import say
from holdfast.wire.http.tls import with_tls
from holdfast.wire.secret import SECRET_FILE_VARIABLE, given_secret_file, read_secret
from holdfast_platform.pods.host import PodHost

app = make_app("Run programs of a controller on this machine.")


@app.command()
def host(
    address: Annotated[str, typer.Argument(help="HOST:PORT of the controller")],
    group: Annotated[str, typer.Option(help="group that this machine belongs to")],
    name: Annotated[str, typer.Option(help="left out: the machine's name")] = "",
    secret: Annotated[
        Path | None, typer.Option(help="file of the secret; left out: HOLDFAST_SECRET_FILE")
    ] = None,
) -> int:
    """Take part in the gangs of a controller (docs/guide/pods.md), until the controller ends.

    \b
    Example:
      holdfast host 10.0.0.5:7700 --group big --secret controller.secret
    """
    path = secret or given_secret_file(os.environ)
    if path is None:
        raise UserError(
            "the controller's secret is not known",
            where="--secret",
            remedy=f"name its file here, or in {SECRET_FILE_VARIABLE}",
        )
    called, _, port = address.rpartition(":")
    if not called or not port.isdigit():
        raise UserError(
            f"{address!r} is no address", where="ADDRESS", remedy="use HOST:PORT of the controller"
        )
    mine = name or default_node_name(os.environ)
    known = read_secret(path, is_given=True, say=say)
    say(f"{mine} runs programs of {address}, in group {group}")
    known = known if is_loopback(called) else with_tls(known)
    PodHost(address, known, mine, group, say).run()
    return 0

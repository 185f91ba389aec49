"""`holdfast stage`: keep other machines' snapshots in this machine's memory."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.checkpoint.peers.client import split_address
from holdfast.checkpoint.peers.peer_tier import StagingNode
from holdfast.cli.dispatch import app as make_app
from holdfast.config.sections.peers import is_loopback
from holdfast.errors import UserError
from holdfast.events import RequestsRefused
from holdfast.machine.limits import available_memory
from holdfast.show.output import print_line, say
from holdfast.wire import lifeline
from holdfast.wire.http.refusals import describe_refusals
from holdfast.wire.http.sockets import bind_listener
from holdfast.wire.http.tls import with_tls
from holdfast.wire.secret import read_secret

REPORT_INTERVAL_S = 2.0  # Seconds between two checks for something new to report

GB = 1e9

app = make_app("Keep other machines' snapshots in this machine's memory.")


@app.command()
def stage(
    listen: Annotated[str, typer.Option(help="address and port to listen on, host:port")],
    secret: Annotated[Path, typer.Option(help="file with the run's secret (mode 0600)")],
    memory: Annotated[float, typer.Option(help="GB that copies may take; each rank needs two")],
    tls: Annotated[
        bool | None,
        typer.Option(help="speak TLS, as the run (cluster.tls); default: unless --listen is local"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON lines")] = False,
) -> int:
    """Keep the copies that a run's movers send here, until Ctrl-C. Nothing is written to disk.

    The run file of the training machines names this one under checkpoint.peers. The secret is the
    run's own: copy the file `secret` of the run folder here first, readable by you alone.

    \b
    Example:
      holdfast stage --listen 10.0.0.7:7600 --secret run.secret --memory 64
    """
    try:
        host, port = split_address(listen, min_port=0)
    except ValueError:
        raise UserError(
            f"{listen!r} is not an address",
            where="--listen",
            remedy="use host:port, such as 10.0.0.7:7600",
        ) from None
    if not memory > 0:
        raise UserError(
            f"{memory:g} GB keep nothing",
            where="--memory",
            remedy="use the size of two snapshots of every rank, or more",
        )
    free = available_memory()
    if memory * GB > free:
        raise UserError(
            f"{memory:g} GB are more than this machine has free",
            where="--memory",
            remedy=f"use {free / GB:.1f} or less",
        )
    known = read_secret(secret, is_given=True, say=say)
    known = with_tls(known) if (not is_loopback(host) if tls is None else tls) else known
    kept = StagingNode(
        bind_listener(host, port, "--listen"),
        known,
        int(memory * GB),
        lambda event: _print_refusals(event, json),
    )
    try:
        return _watch(kept, json)
    finally:
        kept.close()


def _watch(kept: Any, json: bool) -> int:
    """Say what is kept whenever that changes, until a signal asks to end."""
    leave, told = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(told)
    for number in lifeline.AGENT_SIGNALS:
        if not lifeline.is_ignored_hangup(number):
            signal.signal(number, lambda *_: None)
    if json:
        print_line({"address": kept.address})
    else:
        say(f"keeping snapshots at {kept.address}; Ctrl-C ends it and discards the snapshots")
    last: list[Any] = []
    while not select.select([leave], [], [], REPORT_INTERVAL_S)[0]:
        keeps = kept.status()["keeps"]
        if keeps["snapshots"] != last:
            last = keeps["snapshots"]
            _print_kept(keeps, json)
    return 0


def _print_refusals(event: RequestsRefused, json: bool) -> None:
    """Once a minute at most; nothing of what was asked is in it."""
    if json:
        print_line({"time": time.time(), "refused": event.counts})
    elif (line := describe_refusals(event)) is not None:
        say(line)


def _print_kept(keeps: dict[str, Any], json: bool) -> None:
    if json:
        print_line({"time": time.time(), **keeps})
        return
    steps = sorted({(g, s) for g, s, _ in keeps["snapshots"]}, reverse=True)
    newest = f"step {steps[0][1]}, membership {steps[0][0]}" if steps else "nothing"
    say(
        f"{len(keeps['snapshots'])} snapshots, the newest of {newest}; {keeps['used'] / 1e9:.2f} "
        f"of {keeps['room'] / 1e9:.2f} GB, {keeps['pulled'] / 1e9:.2f} GB came, "
        f"{keeps['reused'] / 1e9:.2f} GB lay here already"
    )

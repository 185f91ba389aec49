"""`holdfast cluster`: a Ray or Slurm of one's own on this machine, around a run."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from holdfast.api.early_end import early_signals_answered
from holdfast.api.progress import StageProgress
from holdfast.cli.dispatch import app as make_app
from holdfast.errors import UserError
from holdfast.show.output import print_json, print_table, say
from holdfast_platform.clusters.cluster import (
    ClusterState,
    ClusterStates,
    DisposableCluster,
    check_name,
)
from holdfast_platform.clusters.lifecycle import ClusterLifecycle, open_kind, take_down
from holdfast_platform.clusters.processes import living

MOST_NODES = 200

Name = Annotated[str, typer.Argument(help="of the cluster")]

app = make_app("Bring up a disposable cluster on this machine, and take it down.")


@app.command()
def up(
    name: Name,
    kind: Annotated[str, typer.Option(help="ray or slurm")],
    nodes: Annotated[int, typer.Option(help="of the cluster; each has daemons of its own")] = 2,
    cpus: Annotated[int, typer.Option(help="of each node; 0: as many as this machine has")] = 0,
) -> int:
    """Start a cluster and wait until all its nodes are usable. Called again, start what has ended.

    What leads commands to the cluster goes to stdout, as a line for the shell.

    \b
    Example:
      holdfast cluster up try --kind slurm --nodes 5
    """
    check_name(name)
    cluster = open_kind(kind)
    wanted = ClusterState(name, kind, nodes, cpus or os.cpu_count() or 1, Path())
    if not 1 <= wanted.nodes <= MOST_NODES:
        raise UserError(
            f"a cluster of {wanted.nodes} nodes cannot be made here",
            where="--nodes",
            remedy=f"use 1 to {MOST_NODES}",
        )
    if wanted.cpus < 1:
        raise UserError(
            f"a node of {wanted.cpus} CPUs makes no sense", where="--cpus", remedy="use 1 or more"
        )
    states = ClusterStates()
    with states.locked(), early_signals_answered(), StageProgress() as progress:
        lifecycle = ClusterLifecycle(
            cluster, states, lambda done, total: progress.show("usable nodes", done, total)
        )
        found = states.read(name)
        if found is not None and not living(found):
            progress.say(f"no process of cluster {name} is left; it starts again in another folder")
            take_down(states, found)
            found = None
        if found is None:
            _show(cluster, lifecycle.begin(wanted))
            return 0
        _check_same(found, wanted)
        missing = sorted(found.processes.keys() - living(found))
        if missing:
            progress.say(f"cluster {name} has lost {', '.join(missing)}, which start again")
        else:
            progress.say(f"cluster {name} is there")
        _show(cluster, lifecycle.mend(found))
    return 0


@app.command()
def down(name: Name) -> int:
    """End all processes of a cluster and remove its folder. Runs on it lose their machines.

    \b
    Example:
      holdfast cluster down try
    """
    check_name(name)
    states = ClusterStates()
    with states.locked():
        found = states.read(name)
        if found is None:
            say(f"there is no cluster {name}; nothing is left to end")
            return 0
        ended = take_down(states, found)
    if ended.left:
        pids = ", ".join(str(each.pid) for each in ended.left)
        say(f"these processes of cluster {name} do not end: {pids}; call this again later")
        return 1
    say(f"{ended.processes} processes have ended, and {found.folder} is removed: nothing is left")
    return 0


@app.command("list")
def list_clusters(json: Annotated[bool, typer.Option("--json", help="print JSON")] = False) -> None:
    """Show the clusters of this user on this machine.

    \b
    Example:
      holdfast cluster list
    """
    states = ClusterStates()
    found = [state for name in states.names() if (state := states.read(name))]
    rows = [
        (s.name, s.kind, s.nodes, f"{len(living(s))} of {s.nodes + 1}", s.folder) for s in found
    ]
    head = ("name", "kind", "nodes", "daemons alive", "folder")
    if json:
        print_json([dict(zip(head, row, strict=True)) for row in rows])
    elif rows:
        print_table(rows, head)
    else:
        say("there is no cluster; begin with: holdfast cluster up NAME --kind slurm")


def _show(cluster: DisposableCluster, state: ClusterState) -> None:
    variable, value = cluster.variable(state)
    print(f"export {variable}={shlex.quote(value)}", flush=True)
    say(f"then: holdfast launch run.yaml --on {state.kind} --nodes {state.nodes}")
    say(f"logs: {state.folder}; end it with: holdfast cluster down {state.name}")
    say(cluster.who_may_use)


def _check_same(found: ClusterState, wanted: ClusterState) -> None:
    if (found.kind, found.nodes, found.cpus) != (wanted.kind, wanted.nodes, wanted.cpus):
        raise UserError(
            f"cluster {found.name} is there, and has another shape: {found.kind}, {found.nodes} "
            f"nodes, {found.cpus} CPUs each",
            where="command line",
            remedy=f"take it down with: holdfast cluster down {found.name}",
        )

"""`holdfast logs`: what the nodes of a run have printed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Protocol

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import RunArgument
from holdfast.doctor.state import is_at_work
from holdfast.errors import RunFolderError
from holdfast.launch.owners.owner import (
    JOB_FILE,
    NodeState,
    NodeStatus,
    OwnedJob,
    chosen_nodes,
    open_owner,
)
from holdfast.launch.run.holder import HolderWatch
from holdfast.launch.run.runs import folder_with_job
from holdfast.show.output import say

FOLLOW_INTERVAL_S = 1.0

app = make_app("Print what the nodes of a run have printed.")


@app.command()
def logs(
    run: RunArgument,
    node: Annotated[str, typer.Option(help="one node alone; left out: all of them")] = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="continue until no node is at work")
    ] = False,
) -> int:
    """Print what the nodes of a run have printed so far.

    Of a run that 'holdfast launch' started, its owner has the lines. Of any other run, these are
    the logs of its agents in the run folder.

    \b
    Example:
      holdfast logs runs/my-run --node node-0
      holdfast logs runs/my-run --follow
    """
    folder = folder_with_job(run)
    source: _Source = _AgentLogs(folder)
    if (folder / JOB_FILE).exists():
        source = _OwnerLogs(OwnedJob.read(folder))
    try:
        for line in _followed(source, node) if follow else source.lines(node):
            print(line, flush=follow)
    except KeyboardInterrupt:
        if not follow:
            raise
    return 0


class _Source(Protocol):
    """What has the lines of nodes."""

    def status(self) -> list[NodeStatus]: ...

    def lines(self, node: str) -> Iterator[str]:
        """Yield the lines of a node; of all nodes, with their names, if `node` is empty."""


class _OwnerLogs:
    def __init__(self, job: OwnedJob) -> None:
        self._job, self._owner = job, open_owner(job.owner)

    def status(self) -> list[NodeStatus]:
        return self._owner.status(self._job)

    def lines(self, node: str) -> Iterator[str]:
        return self._owner.logs(self._job, node)


class _AgentLogs:
    """The logs `agent.NODE.log` in a run folder; `agent.log` of a run of one node."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._watch = folder, HolderWatch(folder, say)

    def status(self) -> list[NodeStatus]:
        state = NodeState.FINISHED
        if is_at_work(self._folder, self._watch):
            state = NodeState.RUNNING
        return [NodeStatus(name, state) for name in self._files()]

    def lines(self, node: str) -> Iterator[str]:
        files = self._files()
        for name in chosen_nodes(list(files), node):
            for line in files[name].read_text("utf-8", "replace").splitlines():
                yield line if node or len(files) == 1 else f"{name}: {line}"

    def _files(self) -> dict[str, Path]:
        files = sorted((self._folder / "logs").glob("agent*.log"))
        if not files:
            raise RunFolderError(
                "no node of this run has a log here",
                where=str(self._folder),
                remedy="call this where the run trains, or see its journal: holdfast watch RUN",
            )
        return {path.stem.removeprefix("agent.") or path.stem: path for path in files}


def _followed(source: _Source, node: str) -> Iterator[str]:
    """Yield the lines of one node, or of all, until none is at work."""
    read: dict[str, int] = {}
    is_live = True
    while is_live:
        nodes = source.status()  # first: what a node printed last is read after its end
        is_live = any(each.is_live for each in nodes if node in ("", each.node))
        for name in [node] if node else [each.node for each in nodes]:
            for number, line in enumerate(source.lines(name)):
                if number >= read.get(name, 0):
                    read[name] = number + 1
                    yield line if node or len(nodes) == 1 else f"{name}: {line}"
        if is_live:
            time.sleep(FOLLOW_INTERVAL_S)

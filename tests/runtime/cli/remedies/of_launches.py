"""Remedies of messages about launched runs. Their nodes are shells in place of agents."""

from __future__ import annotations

from collections.abc import Callable
from re import Match

import pytest

from holdfast.launch.owners import local
from holdfast.launch.owners.choose import open_owner
from holdfast.launch.owners.owner import JOB_FILE, LaunchRequest, OwnedJob
from holdfast.launch.run.runs import open_run
from tests.runtime.cli.remedies.lab import Case, Lab, case, fixed, remove
from tests.runtime.cli.remedies.of_runs import RUN, attempt, line, replace, run_command

FOLDER = "folder=run"


def with_nodes(script: str, what: Callable[[], object]) -> None:
    """Call something with nodes that run a script of the shell."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "module_command", lambda *_: ["/bin/sh", "-c", script])
        what()


def submit(lab: Lab, script: str) -> OwnedJob:
    """Start a job of the run, as `launch` does."""
    found, jobs = open_run(lab.folder / RUN), []
    place = str(found.folder)
    request = LaunchRequest("tiny", place, found.folder, found.folder / "secret", found.config, 2)
    with_nodes(script, lambda: jobs.append(local.LocalOwner().submit(request)))
    jobs[0].write(found.folder)
    return jobs[0]


def launch_it(lab: Lab, found: Match[str] | None = None) -> None:
    submit(lab, "true")


def launch_long(lab: Lab) -> None:
    submit(lab, "exec sleep 600")


def spoil(lab: Lab) -> None:
    lab.write(f"{RUN}/{JOB_FILE}", "[]")


def launch_again(lab: Lab) -> None:
    with_nodes("true", lambda: attempt(lab))


def end_them(lab: Lab, found: Match[str]) -> None:
    run_command(found[1].split()[1:])


START = (r"start one with: holdfast launch RUN_FILE --on OWNER", launch_it)

CASES: list[Case] = [
    case(
        "launch/owners/owner.py: no job of this run is known here",
        line("logs run"),
        attempt,
        *START,
    ),
    case(
        "launch/owners/owner.py: this is not what 'holdfast launch' wrote",
        line("logs run", spoil),
        attempt,
        r"remove it, and end the job with its owner's own command",
        remove(f"{RUN}/{JOB_FILE}"),
        START,
    ),
    case(
        "launch/owners/owner.py: this job has no node …",
        line("logs run --node node-7", launch_it),
        attempt,
        r"use one of (\S+), .*",
        replace("node-7"),
    ),
    case(
        "launch/owners/choose.py: … owns no machines that are known",
        lambda lab: lab.settings.update(word="nomad"),
        lambda lab: open_owner(lab.settings["word"]),
        r"use one of (\w+), .*",
        lambda lab, found: fixed(word=found[1])(lab, found),
    ),
    case(
        "cli/launch.py: … still has nodes of this run (job …)",
        line(f"launch run.yaml {FOLDER} --fresh", launch_long),
        launch_again,
        r"end them first with: (holdfast down \S+)",
        end_them,
    ),
]

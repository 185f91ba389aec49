"""Remedies of messages about Slurm. Its commands are scripts (`tests/support/fake_slurm.py`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from re import Match
from typing import Any

import pytest

from holdfast.config.run import RunConfig
from holdfast.config.sections.launch import LaunchConfig
from holdfast.config.sections.launch_slurm import SlurmConfig
from holdfast.launch.owners.choose import open_owner
from holdfast.launch.owners.owner import LaunchRequest
from tests.runtime.cli.remedies.lab import Case, Lab, case, fixed
from tests.support.fake_slurm import FakeSlurm

REFUSED = "sbatch: error: Batch job submission failed: "


def begin(refusal: str = "", error: str = "", **settings: Any) -> Callable[[Lab], None]:
    """refusal: of sbatch, until something is changed. error: of every command, until `mend`."""

    def make(lab: Lab) -> None:
        lab.settings |= {"nodes": 2, "on": "slurm"} | settings
        lab.settings["slurm"] = slurm = FakeSlurm(lab.folder / "bin")
        slurm.say("sinfo", "main*|4|1:00:00")
        if refusal:
            slurm.refuse("sbatch", REFUSED + refusal)
        if error:
            slurm.refuse("sinfo", error)

    return make


def submit(lab: Lab) -> None:
    kept = {"nodes", "on", "slurm", "path"}
    given = {key: value for key, value in lab.settings.items() if key not in kept}
    config = RunConfig(name="tiny", launch=LaunchConfig(slurm=SlurmConfig(**given)))
    place, nodes = lab.folder / "run", lab.settings["nodes"]
    request = LaunchRequest("tiny", str(place), place, place / "secret", config, nodes)
    path = lab.settings.get("path", f"{lab.settings['slurm'].folder}:{os.environ['PATH']}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", path)
        job = open_owner(lab.settings["on"])
        if lab.settings["on"] == "slurm":
            job.submit(request)


def change(key: str, value: object = None) -> Callable[[Lab, Match[str]], None]:
    """Set a key as the remedy says, which sbatch then accepts."""

    def mend(lab: Lab, found: Match[str]) -> None:
        lab.settings[key] = type(lab.settings[key])(found[1]) if value is None else value
        (lab.settings["slurm"].folder / "sbatch.err").unlink(missing_ok=True)

    return mend


def start_controller(lab: Lab, found: Match[str]) -> None:
    (lab.settings["slurm"].folder / "sinfo.err").unlink()


HERE = "launch/owners/slurm/commands.py: "
CASES: list[Case] = [
    case(
        f"{HERE}Slurm's command … is not on PATH of this machine",
        begin(path="/nowhere"),
        submit,
        r"run it on a login node of the cluster, or use --on local",
        fixed(on="local"),
    ),
    case(
        f"{HERE}Slurm's controller does not answer (…)",
        begin(error="sinfo: error: Unable to contact slurm controller (connect failure)"),
        submit,
        r"see with 'sinfo' whether it works, and try again",
        start_controller,
    ),
    case(
        f"{HERE}Slurm refuses the job: …",
        begin("Invalid partition name specified", partition="nope"),
        submit,
        r"use one of (\S+)",
        change("partition"),
    ),
    case(
        f"{HERE}… nodes do not fit: … has …",
        begin(nodes=9),
        submit,
        r"ask for at most (\d+), or set launch.slurm.partition",
        change("nodes"),
    ),
    case(
        f"{HERE}the time limit … is longer than the partition's, which is …",
        begin(time="2-00:00:00"),
        submit,
        r"use at most (\S+); the job is queued again after it",
        change("time"),
    ),
]

"""Remedies of messages about disposable clusters. Daemons are scripts."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from re import Match
from unittest.mock import patch

import pytest

from holdfast_platform.clusters import lifecycle
from holdfast_platform.clusters.ray import RayKind
from holdfast_platform.clusters.slurm import SlurmKind
from holdfast_platform.clusters.states import ClusterStates
from holdfast_platform.commands.cluster import down, list_clusters, up
from tests.runtime.cli.remedies.lab import Case, Lab, case, fixed
from tests.support.fake_daemons import write_fake_daemons

DEFAULTS = {"name": "try", "kind": "slurm", "nodes": 1, "cpus": 1}


def as_user(act: Callable[[Lab], object]) -> Callable[[Lab], None]:
    """With the scripts as Slurm, and a state folder of the lab."""

    def run(lab: Lab) -> None:
        programs = lab.folder / "bin"
        if not programs.exists():
            write_fake_daemons(programs)
        with pytest.MonkeyPatch.context() as changed:
            changed.setenv("XDG_STATE_HOME", lab.path("state"))
            changed.setenv("PATH", f"{programs}:{os.environ['PATH']}")
            act(lab)

    return run


def bring_up(lab: Lab) -> None:
    given = {key: lab.settings.get(key, value) for key, value in DEFAULTS.items()}
    with patch.object(lifecycle, "READY_S", 0.0 if "hangs" in lab.settings else 60.0):
        up(**given)
    down(given["name"])


def begin(**settings: object) -> Callable[[Lab], None]:
    return lambda lab: lab.settings.update(settings)


def make_file(name: str) -> Callable[[Lab], None]:
    return as_user(lambda lab: (lab.folder / "bin" / name).touch())


def remove_file(name: str) -> Callable[[Lab, Match[str]], None]:
    return lambda lab, found: (lab.folder / "bin" / name).unlink()


def begin_hanging(lab: Lab) -> None:
    """One node is all that this machine can carry."""
    make_file("hangs")(lab)
    lab.settings.update(hangs=True, nodes=2)


def ask_for_fewer(lab: Lab, found: Match[str]) -> None:
    remove_file("hangs")(lab, found)
    del lab.settings["hangs"]
    lab.settings["nodes"] = 1


def begin_other_shape(lab: Lab) -> None:
    up("try", "slurm", 1, 1)
    lab.settings["nodes"] = 2


def take_down(lab: Lab, found: Match[str]) -> None:
    as_user(lambda lab: down(found[1]))(lab)


def spoil_note(lab: Lab) -> None:
    path = ClusterStates().path("try")
    path.parent.mkdir(parents=True)
    path.write_text("no note")
    lab.settings["note"] = path


def remove_note(lab: Lab, found: Match[str]) -> None:
    Path(lab.settings["note"]).unlink()


def begin_two(lab: Lab) -> None:
    """Another command holds the state folder."""
    lab.settings["held"] = held = ExitStack()
    held.enter_context(ClusterStates().locked())


def end_other(lab: Lab, found: Match[str]) -> None:
    lab.settings["held"].close()


def check_slurm(lab: Lab) -> None:
    with patch("shutil.which", return_value=lab.settings["path"]):
        SlurmKind().check()


def check_ray(lab: Lab) -> None:
    with patch.object(importlib.util, "find_spec", return_value=lab.settings["spec"]):
        RayKind().check()


CASES: list[Case] = [
    case(
        "holdfast_platform/clusters/choose.py: there is no kind of cluster …",
        begin(kind="nomad"),
        as_user(bring_up),
        r"use ray or (slurm)",
        fixed(kind="slurm"),
    ),
    case(
        "holdfast_platform/clusters/states.py: … is no name of a cluster",
        begin(name="../other"),
        as_user(bring_up),
        r"use small letters, digits and '-', such as my-slurm",
        fixed(name="my-slurm"),
    ),
    case(
        "holdfast_platform/commands/cluster.py: a cluster of … nodes cannot be made here",
        begin(nodes=0),
        as_user(bring_up),
        r"use 1 to 200",
        fixed(nodes=1),
    ),
    case(
        "holdfast_platform/commands/cluster.py: a node of … CPUs makes no sense",
        begin(cpus=-1),
        as_user(bring_up),
        r"use 1 or more",
        fixed(cpus=1),
    ),
    case(
        "holdfast_platform/commands/cluster.py: cluster … is there, and has another shape: …, … "
        "nodes, … CPUs each",
        as_user(begin_other_shape),
        as_user(bring_up),
        r"take it down with: holdfast cluster down (\S+)",
        take_down,
    ),
    case(
        "holdfast_platform/clusters/lifecycle.py: … of cluster … has ended: …",
        make_file("refuses"),
        as_user(bring_up),
        r"mend what it says, and call the command again",
        remove_file("refuses"),
    ),
    case(
        "holdfast_platform/clusters/lifecycle.py: … of … nodes are usable after … s",
        begin_hanging,
        as_user(bring_up),
        r"ask for fewer nodes",
        ask_for_fewer,
    ),
    case(
        "holdfast_platform/clusters/states.py: this is no note of a cluster",
        as_user(spoil_note),
        as_user(lambda lab: list_clusters(json=True)),
        r"remove the file, and end the processes of that cluster by hand",
        remove_note,
    ),
    case(
        "holdfast_platform/clusters/states.py: another 'holdfast cluster' is at work",
        as_user(begin_two),
        as_user(bring_up),
        r"call this again when it has ended",
        end_other,
    ),
    case(
        "holdfast_platform/clusters/slurm.py: … of Slurm is not on this machine",
        begin(path=None),
        check_slurm,
        r"install it with: apt-get install slurmctld slurmd slurm-client "
        r"slurm-wlm-basic-plugins",
        fixed(path="/usr/sbin/slurmctld"),
    ),
    case(
        "holdfast_platform/clusters/ray.py: ray cannot be imported here",
        begin(spec=None),
        check_ray,
        r"install it with: pip install 'holdfast\[ray\]'",
        fixed(spec=importlib.machinery.ModuleSpec("ray", None)),
    ),
]

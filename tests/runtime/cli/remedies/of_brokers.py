"""Remedies of messages of `holdfast broker`. No request is served here."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path
from re import Match

import pytest

from holdfast_platform.broker.instances import Instances
from holdfast_platform.commands import broker
from tests.runtime.cli.remedies.lab import Case, Lab, case, fixed
from tests.support.commands import secret_file


def begin(lab: Lab) -> None:
    lab.settings["runs"] = "instances"


def begin_without_package(lab: Lab) -> None:
    lab.settings.update(runs="instances", installed=False)


def begin_at_file(lab: Lab) -> None:
    lab.write("file", "")
    lab.settings["runs"] = "file"


def begin_beside_another(lab: Lab) -> None:
    begin(lab)
    lab.settings["other"] = Instances(lab.folder / "instances")


def begin_with_foreign_file(lab: Lab) -> None:
    begin(lab)
    lab.write("instances/one/instance.json", "[]")


def move_away(lab: Lab, found: Match[str]) -> None:
    (lab.folder / "instances/one").rename(lab.folder / "away")


def serve(lab: Lab) -> None:
    installed = lab.settings.get("installed", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broker, "_serve", lambda *_: None)
        found = ModuleSpec("starlette", None) if installed else None
        patch.setattr("importlib.util.find_spec", lambda name: found)
        runs: Path = lab.folder / lab.settings["runs"]
        broker.broker(runs, secret_file(lab.folder), "127.0.0.1", 0, False)


CASES: list[Case] = [
    case(
        "holdfast_platform/commands/broker.py: this needs the package …",
        begin_without_package,
        serve,
        r"install it with: pip install 'holdfast\[broker\]'",
        fixed(installed=True),
    ),
    case(
        "holdfast_platform/commands/broker.py: this is no folder",
        begin_at_file,
        serve,
        r"name another with --runs",
        fixed(runs="instances"),
    ),
    case(
        "holdfast_platform/broker/instances.py: another broker has this folder",
        begin_beside_another,
        serve,
        r"end that broker, or name another folder with --runs",
        fixed(runs="second"),
    ),
    case(
        "holdfast_platform/broker/instance.py: this is not what 'holdfast broker' wrote",
        begin_with_foreign_file,
        serve,
        r"move its folder away, and end the run's job with 'holdfast down'",
        move_away,
    ),
]

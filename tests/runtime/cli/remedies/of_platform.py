"""Remedies of brokers, clusters, pods and catalogues, carried out."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import patch

import pytest

from holdfast.plan.catalogue import CATALOGUE_FILE, load_catalogue
from holdfast.wire.http import asgi
from holdfast_platform.broker.instances import Instances
from holdfast_platform.clusters.ray import RayKind
from holdfast_platform.commands import broker
from holdfast_platform.pods.controller import Controller
from tests.runtime.cli.remedies.lab import Case, Lab, fixed, values
from tests.support.commands import secret_file


def begin_broker(lab: Lab) -> None:
    lab.settings["runs"] = "instances"


def begin_beside_another(lab: Lab) -> None:
    begin_broker(lab)
    lab.settings["other"] = Instances(lab.folder / "instances")


def serve(lab: Lab) -> None:
    installed = lab.settings.get("installed", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asgi, "serve_asgi", lambda *_: None)
        spec = ModuleSpec("starlette", None) if installed else None
        patch.setattr("importlib.util.find_spec", lambda name: spec)
        runs: Path = lab.folder / lab.settings["runs"]
        broker.broker(runs, secret_file(lab.folder), "127.0.0.1", 0, False)


def check_ray(lab: Lab) -> None:
    with patch.object(importlib.util, "find_spec", return_value=lab.settings["spec"]):
        RayKind().check()


def submit(lab: Lab) -> None:
    with Controller(secret_file=lab.path("secret")) as controller:
        controller.submit(["true"], on=lab.settings["on"])


CASES: list[Case] = [
    Case(
        "holdfast_platform/broker/instances.py",
        begin_beside_another,
        serve,
        r"end that broker, or name another folder with --runs",
        fixed(runs="second"),
    ),
    Case(
        "holdfast_platform/clusters/ray.py",
        values(spec=None),
        check_ray,
        r"install it with: pip install 'holdfast\[ray\]'",
        fixed(spec=importlib.machinery.ModuleSpec("ray", None)),
    ),
    Case(
        "holdfast_platform/pods/controller.py",
        values(on={}),
        submit,
        r"give on=\{GROUP: HOSTS\} with 1 or more hosts",
        fixed(on={"group": 1}),
    ),
    Case(
        "plan/catalogue.py",
        lambda lab: lab.settings.update(file=lab.path("none.csv")),
        lambda lab: load_catalogue(Path(lab.settings["file"])),
        r"name a CSV file, or leave --catalogue out",
        lambda lab, match: lab.settings.update(file=CATALOGUE_FILE),
    ),
]

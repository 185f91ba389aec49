"""Remedies of messages about runs on Ray that need no Ray."""

from __future__ import annotations

import pytest

from holdfast.launch.owners.owner import OwnedJob
from holdfast.launch.owners.ray.owner import RayOwner, _address
from tests.runtime.cli.remedies.lab import Case, Lab, case, fixed

CASES: list[Case] = [
    case(
        "launch/owners/ray/owner.py: the address of Ray's head is not known",
        lambda lab: lab.settings.update(address=""),
        lambda lab: without_variable(lab),
        r"use HOST:PORT, as ray start --head prints it, or set RAY_ADDRESS",
        fixed(address="head:6379"),
    ),
    case(
        "launch/owners/ray/owner.py: the nodes of a run in a bucket print on their own machines",
        lambda lab: lab.settings.update(logs=""),
        lambda lab: read_logs(lab),
        r"read run-1-NODE\.log among the logs of Ray's dashboard",
        lambda lab, found: lab.settings.update(logs=str(lab.write("logs/node-0.log", "").parent)),
    ),
]


def without_variable(lab: Lab) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        _address(lab.settings["address"])


def read_logs(lab: Lab) -> None:
    job = OwnedJob("ray", "run-1", 1, {"address": "head:6379", "logs": lab.settings["logs"]})
    list(RayOwner().logs(job, ""))

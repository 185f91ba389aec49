"""Remedies of messages about measured profiles of layers."""

from __future__ import annotations

import json

from holdfast.plan.cost.layer_times import Part
from holdfast.plan.cost.measured_times import load_profile
from tests.runtime.cli.remedies.lab import Case, Lab, case
from tests.runtime.plan.cost.test_measured_times import WORKLOAD, block_times, profile

FILE = "profile.json"


def read_profile(lab: Lab) -> None:
    load_profile(lab.folder / FILE, WORKLOAD)


def ask_with_tp_2(lab: Lab) -> None:
    block_times(load_profile(lab.folder / FILE, WORKLOAD), Part(128, 128, tp=2))


def measure(lab: Lab, tp: str) -> None:
    """Write a profile that has this degree of tp as well."""
    content = profile()
    for by_tp in content["times"].values():
        by_tp[tp] = by_tp["1"]
    lab.write(FILE, json.dumps(content))


CASES: list[Case] = [
    case(
        "plan/cost/measured_times.py: (_file_error)",
        lambda lab: lab.write(FILE, json.dumps(profile(layers=5))),
        read_profile,
        r"give a profile of this model in the form .*",
        lambda lab, found: lab.write(FILE, json.dumps(profile())),
    ),
    case(
        "plan/cost/measured_times.py: (_error)",
        lambda lab: lab.write(FILE, json.dumps(profile())),
        ask_with_tp_2,
        r"measure tp=(\d+), or leave the profile away to plan from shapes",
        lambda lab, found: measure(lab, found[1]),
    ),
]

"""Remedies of searches in which no layout fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from re import Match

from holdfast.plan.cost.choice import Choice
from holdfast.plan.cost.evaluate import Problem
from holdfast.plan.hardware.cluster import Cluster, NodePool
from holdfast.plan.hardware.devices import load_devices
from holdfast.plan.hardware.link import Link
from holdfast.plan.search.search import Limits, search
from tests.runtime.cli.remedies.lab import Case, Lab, case
from tests.support.plan_brute_force import small_problem

MILLIONS = 40
"""Memory of a device of the cluster, in MB: less than the state of the model."""


def problem_of(nodes: int, memory: float) -> Problem:
    link = Link(1e-6, 1e10)
    device = replace(load_devices()["A100-80"], name="small", memory_bytes=memory * 1e6)
    devices = {"small": replace(device, usable_bytes=device.memory_bytes)}
    pool = NodePool("pool", nodes, 1, "small", link, link)
    return replace(small_problem(0)[0], cluster=Cluster((pool,)), devices=devices)


def begin(memory: float, **limits: object) -> Callable[[Lab], None]:
    return lambda lab: lab.settings.update(nodes=2, memory=memory, limits=limits)


def attempt(lab: Lab) -> None:
    limits = dict(lab.settings["limits"])
    refused = limits.pop("refuses", 0)

    def allows(choice: Choice) -> bool:
        return choice.devices != refused

    problem = problem_of(lab.settings["nodes"], lab.settings["memory"])
    search(problem, Limits(**limits), allows=allows)


def set_limit(lab: Lab, found: Match[str]) -> None:
    lab.settings["limits"][found[1]] = int(found[2])


CASES: list[Case] = [
    case(
        "plan/search/nearest.py: (nothing_fits_error)",
        begin(1e5, devices=2, refuses=2),
        attempt,
        r"use layout.(worker)s=(\d)",
        lambda lab, found: lab.settings["limits"].update(devices=int(found[2])),
        (r"use layout.(tp|pp)=(\d+)", set_limit),
    ),
    case(
        "plan/search/nearest.py: no layout fits …",
        begin(MILLIONS),
        attempt,
        r"use (\d+) more nodes? of pool",
        lambda lab, found: lab.settings.update(nodes=2 + int(found[1])),
    ),
    case(
        "plan/search/nearest.py: no layout fits …, nor … times as many nodes",
        begin(0.001),
        attempt,
        r"use a smaller model, or devices with more memory",
        lambda lab, found: lab.settings.update(memory=1e5),
    ),
]

"""Remedies of messages about the objective of a plan."""

from __future__ import annotations

from collections.abc import Callable
from re import Match

from holdfast.plan.objective.objectives import Deadline, objective_named
from holdfast_lab.commands.scale import scale
from tests.runtime.cli.remedies.lab import Case, Lab, case
from tests.runtime.plan.objective.problems import pool, problem
from tests.support.ranks import ROOT

RUN = ROOT / "examples" / "spot-losses" / "run.yaml"
_WHERE = "plan/objective"


def begin(**settings: object) -> Callable[[Lab], None]:
    return lambda lab: lab.settings.update(settings)


def score(lab: Lab) -> None:
    """Ask for the objective on a cluster with the lab's pool."""
    settings = {"name": "time", "pool": {}, "deadline": None} | lab.settings
    given = problem(pool(**settings["pool"]))
    objective_named(settings["name"], given, deadline=settings["deadline"])


def give(**settings: object) -> Callable[[Lab, Match[str]], None]:
    return lambda lab, found: lab.settings.update(settings)


def draw_curve(lab: Lab) -> None:
    settings = {"cluster": "1x8xV100-16"} | lab.settings
    scale(RUN, ["model.preset=llama3.1-8b"], settings["cluster"], most=8)


CASES: list[Case] = [
    case(
        "holdfast_lab/commands/scale.py: no size has a layout: …",
        begin(),
        draw_curve,
        r"use other machines with --cluster, or train.microbatch_size=1",
        give(cluster="1x8xH100-80"),
    ),
    case(
        f"{_WHERE}/objectives.py: there is no objective …",
        begin(name="speed"),
        score,
        r"use one of (\w+),.*",
        lambda lab, found: lab.settings.update(name=found[1]),
    ),
    case(
        f"{_WHERE}/objectives.py: the objective finish_by needs a date",
        begin(name="finish_by"),
        score,
        r"give the hours in which the run must be done",
        give(deadline=Deadline(10, 1.0)),
    ),
    case(
        f"{_WHERE}/money.py: the objective … needs …, which the cluster does not have for …",
        begin(name="tokens_per_usd", pool={"usd_per_hour": 0.0}),
        score,
        r"give each pool its usd_per_hour, or use plan.objective=time",
        give(pool={}),
    ),
    case(
        f"{_WHERE}/money.py: the objective … needs …, which the cluster does not have for …",
        begin(name="tokens_per_kg_co2", pool={"grams_co2_per_kwh": 0.0}),
        score,
        r"give each pool its grams_co2_per_kwh, or use plan.objective=time",
        give(name="time"),
    ),
]

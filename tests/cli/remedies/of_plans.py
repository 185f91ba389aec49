"""Remedies of messages about plans."""

from __future__ import annotations

from collections.abc import Callable
from re import Match

from holdfast.cli.confirm import confirm_cost
from holdfast.cli.plan_request import read_plan_request
from holdfast.config.load import load_config
from tests.cli.remedies.lab import Case, Lab, case

RUN = "model: {preset: tiny, vocab_size: 512}\ntrain: {batch_size: 1, microbatch_size: 1}\n"


def begin(cluster: str, *overrides: str) -> Callable[[Lab], None]:
    def write(lab: Lab) -> None:
        lab.write("run.yaml", RUN)
        lab.settings.update(cluster=cluster, overrides=list(overrides))

    return write


def make_plan(lab: Lab) -> None:
    overrides, cluster = lab.settings["overrides"], lab.settings["cluster"]
    read_plan_request(lab.folder / "run.yaml", overrides, cluster)


def add(lab: Lab, found: Match[str]) -> None:
    lab.settings["overrides"].append(found[1])


def remove(lab: Lab, found: Match[str]) -> None:
    """Remove the key that the remedy names, and what belongs to it."""
    lab.settings["overrides"] = []


def confirm(lab: Lab) -> None:
    """Begin a run of $250, with no terminal to ask."""
    loaded = load_config(lab.folder / "run.yaml", lab.settings["overrides"])
    confirm_cost(loaded, 249.5)


AUTO = "layout=auto"
CASES: list[Case] = [
    case(
        "plan/auto/search_run.py: layout.workers is …, and … has … devices",
        begin("1xA100-80", AUTO, "layout.workers=2"),
        make_plan,
        r"use (\d+)",
        lambda lab, found: lab.settings["overrides"].append(f"layout.workers={found[1]}"),
    ),
    case(
        "plan/auto/search_run.py: no layout of these machines follows the rules of the run file",
        begin("2xA100-80", AUTO, "train.optimizer.name=muon"),
        make_plan,
        r"use (layout.workers=1), or remove limits of layout",
        add,
    ),
    case(
        "cli/confirm.py: (confirm_cost)",
        begin(""),
        confirm,
        r"pass --yes, or (plan.ask_above_usd=\d+)",
        add,
    ),
    case(
        "cli/plan_request.py: … is beyond the planner, which knows the built-in decoder in "
        "synchronous layouts",
        begin("1xA100-80", "layout.stages=[1,2]", "layout.pp=2"),
        make_plan,
        r"remove (layout.stages), or see the layout with: holdfast layout show",
        remove,
    ),
]

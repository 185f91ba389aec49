"""Remedies of messages about plans."""

from __future__ import annotations

from collections.abc import Callable
from re import Match

from holdfast.api.confirm import confirm_cost
from holdfast.cli.plan import plan
from holdfast.cli.plan_more import write_timeline
from holdfast.cli.plan_request import read_plan_request
from holdfast.config.loading.load import load_config
from holdfast.plan.explain.what_if import after_loss
from holdfast.plan.hardware.cluster_file import read_cluster
from tests.runtime.cli.remedies.lab import Case, Lab, case

RUN = "model: {preset: tiny, vocab_size: 512}\ntrain: {batch_size: 1, microbatch_size: 1}\n"
KEPT = ("train.memory.optimizer=device",)


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


def ask(text: str) -> Callable[[Lab], None]:
    return lambda lab: lab.settings.update(text=text)


def lose(lab: Lab) -> None:
    after_loss(read_cluster("4x2xA100-80"), lab.settings["text"])


def say_instead(lab: Lab, found: Match[str]) -> None:
    lab.settings["text"] = found[1]


def draw(lab: Lab) -> None:
    request = read_plan_request(lab.folder / "run.yaml", lab.settings["overrides"], "2xA100-80")
    write_timeline(request, lab.folder / lab.settings.get("svg", "none/step.svg"))


def compare(lab: Lab) -> None:
    """Ask for a drawing, and until the remedy is followed for a comparison as well."""
    both = None if lab.settings.get("alone") else ("layout.tp=1", "layout.tp=2")
    plan(lab.folder / "run.yaml", [], "2xA100-80", None, both, None, lab.folder / "a.svg", False)


AUTO = "layout=auto"
LARGE = ("model.layers=96", "model.dim=1024", "model.heads=8", "model.ffn_dim=4096")
CASES: list[Case] = [
    case(
        "plan/auto/search_run.py: layout.workers is …, and … has … devices",
        begin("1xA100-80", AUTO, "layout.workers=2"),
        make_plan,
        r"use (\d+)",
        lambda lab, found: lab.settings["overrides"].append(f"layout.workers={found[1]}"),
    ),
    case(
        "plan/auto/search_run.py: no layout fits … on … device…",
        begin("8xV100-16", AUTO, *LARGE, *KEPT, "layout.workers=1"),
        make_plan,
        r"use (layout.workers=\d)",
        add,
    ),
    case(
        "cli/plan_request.py: device is …, and this machine has none",
        begin("", AUTO, "device=cuda"),
        make_plan,
        r"name the machines, for example --cluster 8xH100-80, or use (device=cpu)",
        add,
    ),
    case(
        "cli/plan.py: --compare shows two plans, and --svg and --what-if are about one",
        begin(""),
        compare,
        r"use them in a call of their own",
        lambda lab, found: lab.settings.update(alone=True),
    ),
    case(
        "plan/explain/what_if.py: the racks of the pool … are not known",
        ask("lost=rack:A100-80"),
        lose,
        r"give it nodes_per_rack, or use (lost=node:A100-80)",
        say_instead,
    ),
    case(
        "api/confirm.py: (confirm_cost)",
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
    case(
        "plan/auto/objective.py: plan.finish_by … has passed",
        begin("1xA100-80", AUTO, "plan.objective=finish_by", "plan.finish_by=2020-01-01"),
        make_plan,
        r"use a later date, or (plan.objective=time)",
        add,
    ),
    case(
        "plan/explain/what_if.py: this is not a loss",
        ask("3"),
        lose,
        r"write (lost=3) \(nodes\), .*",
        say_instead,
    ),
    case(
        "plan/explain/what_if.py: the pool … has … nodes, fewer than are lost",
        ask("lost=9"),
        lose,
        r"use (lost=4) or fewer",
        say_instead,
    ),
    case(
        "plan/explain/what_if.py: there is no pool …",
        ask("lost=node:b"),
        lose,
        r"use (lost=node:A100-80)",
        say_instead,
    ),
    case(
        "plan/explain/what_if.py: no pool is in the zone …",
        ask("lost=zone:x"),
        lose,
        r"use (lost=1)",
        say_instead,
    ),
    case(
        "show/output.py: it cannot be written (…)",
        begin("2xA100-80", AUTO, "layout.workers=1"),
        draw,
        r"name a file in a folder that is there",
        lambda lab, found: lab.settings.update(svg="step.svg"),
    ),
]

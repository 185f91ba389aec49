"""What the planner chooses after losses, against everything that could have been chosen.

    python -m benchmarks.runtime.plan_losses layouts  12 seeded losses among 3 and 4 ranks that wait
    python -m benchmarks.runtime.plan_losses kills    12 real kills in runs of 4 nodes: the losses

`layouts`: the planner that agents ask (`plan/placing/searched.py`) lays out a run, loses a node,
and lays out what is left. Then every layout of what is left is executed, with equal and with
unlike replicas. Devices wait and links are shaped (`benchmarks/runtime/here/waiting_rank.py`).

`kills`: nodes of real runs with `layout: auto` are killed one after the other, from four to one.
The loss of each step is compared with that of an undisturbed run.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, count, islice, product
from math import inf, prod
from pathlib import Path

from benchmarks.runtime.here.waiting_ranks import (
    DEVICE,
    WaitingCase,
    pool_of,
    step_seconds,
    waiting_device,
)
from holdfast.config.run import RunConfig
from holdfast.errors import LayoutError
from holdfast.layout import Topology
from holdfast.plan.cost.choice import Choice
from holdfast.plan.hardware.link import Link
from holdfast.plan.placing.interface import NodePlaces, PresentPlacement
from holdfast.plan.placing.planner import plan_layout
from holdfast.plan.placing.searched import SearchedPlanner
from holdfast.plan.placing.topology_cost import Fleet, TopologyCost
from holdfast.plan.search.search import Limits

WITHIN, LOSSES = 0.05, 12


@dataclass(frozen=True)
class Loss:
    """One seeded loss. chosen: the layout of what is left."""

    seed: int
    before: Topology
    chosen: Topology
    config: RunConfig
    fleet: Fleet
    left: tuple[NodePlaces, ...]


def losses() -> Iterator[Loss]:
    """By rising seed."""
    for seed in count():
        draw = random.Random(seed)
        nodes = [NodePlaces(name, 1) for name in "abcd"[: draw.randint(3, 4)]]
        link = Link(draw.choice([1e-4, 5e-4, 2e-3]), draw.choice([10e6, 30e6, 100e6, 300e6]))
        fleet = Fleet({DEVICE: waiting_device()}, pool_of(1, 1, link, link))
        config = _run(draw.choice(["tiny", "small"]))
        planner = SearchedPlanner(fleet, Limits(cp=1))
        before = planner(config, nodes, 1).topology
        gone = draw.choice(before.nodes)
        left = tuple(node for node in nodes if node.name != gone)
        chosen = planner(config, left, 2, PresentPlacement(before)).topology
        yield Loss(seed, before, chosen, config, fleet, left)


def _run(preset: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"preset": preset, "vocab_size": 2048},
            "data": {"sequence_length": 256},
            "train": {"batch_size": 12, "microbatch_size": 1, "precision": "fp32"},
            "layout": {"zero": 1},
        }
    )


def alternatives(loss: Loss) -> list[Topology]:
    """Every layout of what is left, on all workers or on all but one."""
    found: dict[str, Topology] = {}
    workers = len(loss.left)
    degrees = product(*(range(1, workers + 1) for _ in range(4)))
    meshes = [mesh for mesh in degrees if prod(mesh) <= workers and mesh[2] == 1]
    for number in range(1, workers + 1):
        for every in combinations_with_replacement(meshes, number):
            if workers - 1 <= sum(map(prod, every)) <= workers:
                replicas = [
                    dict(zip(("pp", "dp_shard", "cp", "tp"), mesh, strict=True)) for mesh in every
                ]
                layout = loss.config.layout.model_dump() | {"workers": 0, "replicas": replicas}
                layout["workers"] = sum(map(prod, every))
                with suppress(ValueError, LayoutError):
                    changed = RunConfig.model_validate(
                        loss.config.model_dump() | {"layout": layout}
                    )
                    topology = plan_layout(changed, loss.left, 2).topology
                    found[words(topology)] = topology
    return list(found.values())


def measured(loss: Loss, topology: Topology) -> float:
    """Seconds of a step on ranks that wait. A layout that is predicted to be twice as slow as the
    chosen one has fewer steps."""
    costs = TopologyCost(loss.config, loss.fleet, loss.left)
    is_slow = costs.cost(topology).step_s > 2 * costs.cost(loss.chosen).step_s
    steps = 2 if is_slow else 4
    choice: Choice = costs.choice(topology)
    pool = replace(loss.fleet.node, name=choice.replicas[0].pools[0], nodes=len(loss.left))
    return step_seconds(WaitingCase(words(topology), loss.config, choice, pool), steps)


def words(topology: Topology) -> str:
    names = ("pp", "shard", "cp", "tp")
    counts = Counter(replica.mesh_shape for replica in topology.replicas)
    found = []
    for mesh, number in counts.items():
        own = " ".join(f"{name}{n}" for name, n in zip(names, mesh, strict=True) if n > 1)
        found.append(f"{number} x {own or 'one'}")
    return ", ".join(found)


def layouts(given: argparse.Namespace) -> int:
    print(f"load {os.getloadavg()[0]:.1f}")
    print(f"{'seed':>4} {'before':<18}{'left':>5} {'chosen':<12}{'ms':>8} {'best':<12}{'ms':>8}")
    behind = []
    for loss in islice(losses(), given.losses):
        every = {words(topology): topology for topology in alternatives(loss)}
        times = dict.fromkeys(every, inf)
        for _ in range(given.rounds):
            for name, topology in every.items():
                times[name] = min(times[name], measured(loss, topology))
        chosen = words(loss.chosen)
        best = min(times, key=lambda name: times[name])
        behind.append(times[chosen] / times[best] - 1)
        print(
            f"{loss.seed:>4} {words(loss.before):<18}{len(loss.left):>5} {chosen:<12}"
            f"{1e3 * times[chosen]:8.0f} {best:<12}{1e3 * times[best]:8.0f} {behind[-1]:+7.1%}"
            f"   of {len(times)}",
            flush=True,
        )
    within = sum(each <= WITHIN for each in behind)
    print(f"within {WITHIN:.0%} of the best measured: {within} of {len(behind)} losses")
    return 0 if within == len(behind) else 1


def kills(given: argparse.Namespace) -> int:
    from tests.support.nodes import prepared

    from benchmarks.runtime.here.killed_runs import killed_run, undisturbed_losses

    with tempfile.TemporaryDirectory() as text:
        run_file = prepared(Path(text) / "run-file")
        reference = undisturbed_losses(run_file)
        worst = 0.0
        for seed in range(given.runs):
            for change in killed_run(run_file, Path(text) / f"run{seed}", seed, reference):
                print(change, flush=True)
                worst = max(worst, change.difference)
    print(f"largest relative difference of a step's loss: {worst:.1e}")
    return 0 if worst < 1e-10 else 1


def main(words_given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("layouts", help="seeded losses on ranks that wait")
    one.add_argument("--losses", type=int, default=LOSSES)
    one.add_argument("--rounds", type=int, default=1, help="in turn; the least of each counts")
    one.set_defaults(run=layouts)
    other = commands.add_parser("kills", help="real kills of nodes")
    other.add_argument("--runs", type=int, default=4, help="of three kills each")
    other.set_defaults(run=kills)
    given = parser.parse_args(words_given)
    return int(given.run(given))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

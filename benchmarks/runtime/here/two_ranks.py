"""Every layout of two ranks with real workers of one thread each. They take turns.

A loop is two worker processes (`benchmarks/peers/ours.py`), as in `benchmarks/runtime/layouts.py`.
All loops of a set live at once and take turns, so a busy machine slows all of them alike. The time
of a layout is the lower quartile of its blocks.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.peers.ours import run_config
from benchmarks.peers.work import Work
from benchmarks.peers.worker import NAMES
from benchmarks.runtime.turns import Loop, costs
from holdfast.config.run import RunConfig
from holdfast.config.sections.layout import LayoutConfig
from holdfast.layout import Layout, Topology, place_layout
from holdfast.plan.cost.evaluate import Evaluator, StepCost
from holdfast.plan.cost.layer_times import LayerTimes
from holdfast.plan.placing.interface import NodePlaces
from holdfast.plan.placing.topology_cost import Fleet, TopologyCost

NODE = "here"


@dataclass(frozen=True)
class Case:
    """One layout of two ranks. loop: a name of `benchmarks/peers/worker.py`. microbatches: parts of
    a step. experts: of each block; layouts of the same model are compared with each other."""

    name: str
    loop: str
    microbatches: int = 1
    experts: int = 0


CASES = (
    Case("dp2", "holdfast"),
    Case("dp2, 4 microbatches", "holdfast", 4),
    Case("dp_shard2 zero 1", "holdfast-zero1"),
    Case("dp_shard2 zero 2", "holdfast-zero2"),
    Case("dp_shard2 zero 2, at the step's end", "holdfast-zero2-step", 4),
    Case("dp_shard2 zero 3", "holdfast-zero3"),
    Case("dp_shard2 zero 3, 4 microbatches", "holdfast-zero3", 4),
    Case("tp2", "holdfast-tp2"),
    Case("tp2, tokens not cut", "holdfast-tp2-whole"),
    Case("cp2 allgather", "holdfast-cp2"),
    Case("cp2 ring", "holdfast-cp2-ring"),
    Case("cp2 ulysses", "holdfast-cp2-ulysses"),
    Case("pp2 1f1b", "holdfast-pp2", 8),
    Case("pp2 gpipe", "holdfast-pp2-gpipe", 8),
    Case("pp2 interleaved", "holdfast-pp2-interleaved", 8),
    Case("pp2 zb-h1", "holdfast-pp2-zb-h1", 8),
    Case("pp2 zbv", "holdfast-pp2-zbv", 8),
    Case("pp2 dualpipev", "holdfast-pp2-dualpipev", 8),
    Case("experts: dp2", "holdfast", experts=8),
    Case("experts: zero 3", "holdfast-zero3", experts=8),
    Case("experts: ep2 zero 3", "holdfast-ep2", experts=8),
    Case("experts: ep2 with copies", "holdfast-ep2-copies", experts=8),
)


def placed(case: Case, work: Work) -> tuple[RunConfig, Topology]:
    """The run file and the topology of a case, as its loop makes them."""
    _, settings = NAMES[case.loop]
    degrees = {axis: int(str(settings.get(axis, 1))) for axis in ("pp", "tp", "cp")}
    degrees["dp_shard"] = int(str(settings.get("shards", 1)))
    schedule = str(settings.get("schedule", "1f1b"))
    named = LayoutConfig.model_validate({"schedule": schedule})
    ranks = 2
    for degree in degrees.values():
        ranks //= degree
    pp = degrees["pp"]
    layout = Layout(
        dp_replicate=ranks,
        **degrees,
        stages=work.stages(pp * named.stages_a_worker) if pp > 1 else (),
        is_folded=named.is_folded and pp > 1,
    )
    keys = ("cp_method", "ep", "zero2_reduce", "sequence_parallel")
    more: dict[str, Any] = {key: settings[key] for key in keys if key in settings}
    more["expert_replicas"] = settings.get("copies", "off")
    zero = int(str(settings.get("zero", 3)))
    config = run_config(work, 2, layout, zero, schedule, **more)
    return config, place_layout(layout, 1, (NODE, NODE))


def predicted(case: Case, work: Work, fleet: Fleet, times: LayerTimes | None = None) -> StepCost:
    """times: of layers; None: from shapes and the constants of the calibration."""
    config, topology = placed(case, work)
    costs = TopologyCost(config, fleet, [NodePlaces(NODE, 2)])
    return Evaluator(replace(costs.problem, times=times)).cost(costs.choice(topology))


def works(cases: Sequence[Case], shape: dict[str, Any]) -> list[Work]:
    return [Work(**shape, microbatches=case.microbatches, experts=case.experts) for case in cases]


def measured(
    cases: Sequence[Case], shape: dict[str, object], rounds: int, steps: int
) -> list[list[float]]:
    """Seconds of a step of each case, one for each round."""
    taken: list[list[float]] = [[] for _ in cases]
    with tempfile.TemporaryDirectory() as text:
        loops: list[Loop] = []
        try:
            for index, work in enumerate(works(cases, shape)):
                folder = Path(text) / str(index)
                loops.append(Loop(cases[index].loop, work, python_here(), folder, 120.0))
            for loop in loops:
                loop.answers()
                loop.block(1)
            for index in range(rounds):
                order = range(len(loops)) if index % 2 else reversed(range(len(loops)))
                for at in order:
                    wall, _ = costs(loops[at].block(steps))
                    taken[at].append(wall / steps)
        finally:
            for loop in loops:
                loop.close()
    return taken


def lower_quartile(times: Sequence[float]) -> float:
    return statistics.quantiles(times, n=4)[0] if len(times) > 1 else times[0]


def save(
    path: Path,
    cases: Sequence[Case],
    taken: Sequence[Sequence[float]],
    profile: Mapping[str, float],
) -> None:
    rows = {case.name: list(times) for case, times in zip(cases, taken, strict=True)}
    kept = {"load": os.getloadavg(), "profile": dict(profile), "seconds": rows}
    path.write_text(json.dumps(kept, indent=1) + "\n")


def python_here() -> str:
    return sys.executable

"""The stages of a pipeline in `holdfast layout show`: their blocks, and what each costs."""

from __future__ import annotations

from typing import Any

from holdfast.config.run import RunConfig
from holdfast.errors import LayoutError
from holdfast.layout import Replica, Topology
from holdfast.plan.memory.stage_memory import PipelineMemory, check_memory_formula
from holdfast.plan.placing.balance import times_of_stages
from holdfast.report.formatting import format_bytes
from holdfast.show.output import print_table


def stages_as_json(config: RunConfig, replica: Replica) -> list[dict[str, Any]]:
    """A value for each stage of a pipeline, in order; none for a replica without one. time: its
    part of the model's time. peak: bytes of its worker; None where no formula says it."""
    if replica.degree("pp") == 1:
        return []
    times, peaks = times_of_stages(config, replica), _peaks(config, replica)
    return [
        {
            "stage": stage,
            "pp": replica.pp_of(stage),
            "blocks": [replica.stage_blocks(stage)[0], replica.stage_blocks(stage)[-1]],
            "time": time / (sum(times) or 1.0),
            "peak": peaks[replica.pp_of(stage)] if peaks else None,
        }
        for stage, time in enumerate(times)
    ]


def print_stages(config: RunConfig, topology: Topology) -> None:
    """Print the stages of each kind of replica."""
    for kind in topology.kinds:
        _print_pipeline(config, next(r for r in topology.replicas if r.kind == kind))


def _print_pipeline(config: RunConfig, replica: Replica) -> None:
    found = stages_as_json(config, replica)
    if not found:
        return
    named = any(degrees.stages == replica.stages for _, degrees in config.layout.kinds)
    by = "as the run file names them" if named else f"by layout.balance {config.layout.balance}"
    unit = "layout.balance_costs" if config.layout.balance_costs else "FLOPs"
    print(f"stages {by}; time in {unit}, peak of the worker on one replica's share")
    rows = [
        [
            each["stage"],
            each["pp"],
            _span(each["blocks"]),
            f"{each['time']:.1%}",
            "no formula" if each["peak"] is None else format_bytes(each["peak"]),
        ]
        for each in found
    ]
    print_table(rows, ["stage", "pp", "blocks", "time", "peak"])


def _span(blocks: list[int]) -> str:
    first, last = blocks
    return str(first) if first == last else f"{first}-{last}"


def _peaks(config: RunConfig, replica: Replica) -> list[int]:
    """The peak of each worker along pp; none if no formula says it."""
    try:
        check_memory_formula(config)
    except LayoutError:
        return []
    if not config.model.vocab_size:
        return []
    memory = PipelineMemory(config, replica.mesh_shape)
    return [
        round(memory.peak(pp, {s: replica.stages[s] for s in replica.stages_at(pp)}))
        for pp in range(replica.degree("pp"))
    ]

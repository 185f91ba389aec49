"""The estimate of memory in `holdfast layout show`: a row for each rank."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from holdfast.config.run import RunConfig
from holdfast.errors import LayoutError
from holdfast.layout import Replica, Topology
from holdfast.options.protocols import PicturePart
from holdfast.options.registry import option_costs
from holdfast.plan.memory.activations import device_kind, has_estimate, without_formula
from holdfast.plan.memory.communicators import BYTES_EACH, communicators_by_rank
from holdfast.plan.memory.estimate import estimates_by_rank
from holdfast.plan.memory.placed_memory import placed_by_rank
from holdfast.plan.memory.stage_memory import PipelineMemory, check_memory_formula
from holdfast.plan.placing.balance import times_of_stages
from holdfast.report import formatting
from holdfast.report.formatting import format_bytes
from holdfast.show.output import print_table

_NO_FORMULA = "activations, and each rank's memory: no formula covers a run with "
_COLUMNS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "moments": "optimizer",
    "activations": "activations",
    "logits": "logits",
    "gathered": "gathered",
    "communication": "messages",
    "working": "working",
    "fragmentation": "fragments",
    "peak": "peak",
}
_EXPERTS = "experts: each with as many tokens as any other; the run's routing decides"
_SPREAD = (
    "no estimate of each rank's memory with layout.ep: activations take an even load of experts"
)
_CPU = "no fragmentation is added on a CPU; with device=cuda 5 % of what is not state is"
_DEVICE = (
    "fragments: 5 % of what is not state, for the device's allocator (an allowance, not measured)"
)


def print_estimate(config: RunConfig, topology: Topology) -> None:
    """Print what each rank holds at its fullest moment, or that no formula says it."""
    if key := without_formula(config):
        print(_NO_FORMULA + key)
        return
    if not has_estimate(config):
        print(_SPREAD)
        return
    if not config.model.vocab_size:
        print("an estimate of each rank's memory needs model.vocab_size=N")
        return
    print("estimate of each rank's memory at the fullest moment of a step")
    found = estimates_by_rank(config, topology)
    rows = [
        [rank, *[format_bytes(getattr(each, field)) for field in _COLUMNS], each.moment]
        for rank, each in enumerate(found)
    ]
    print_table(rows, ["rank", *_COLUMNS.values(), "moment"])
    if config.model.experts is not None:
        print(_EXPERTS)
    print(_CPU if device_kind(config) == "cpu" else _DEVICE)


def print_options(config: RunConfig, topology: Topology, part: PicturePart) -> None:
    """Print the costs of options that follow this part of the picture."""
    for option in option_costs():
        if option.shown_after != part:
            continue
        for block in option.describe(config, topology, formatting):
            if isinstance(block, str):
                print(block)
            else:
                print_table(*block)


def print_communicators(config: RunConfig, topology: Topology) -> None:
    """Print how many groups of the device's backend each rank has, if there are any."""
    counts = communicators_by_rank(config, topology)
    if not any(counts):
        return
    print(
        "communicators of the device's backend, not in the peak: "
        f"{format_bytes(BYTES_EACH)} each is a report on an old NCCL, not measured here"
    )
    rows = [[r, count, format_bytes(count * BYTES_EACH)] for r, count in enumerate(counts)]
    print_table(rows, ["rank", "communicators", "bytes"])


def estimates_as_json(config: RunConfig, topology: Topology) -> list[dict[str, Any] | None]:
    """A value for each rank; None where no formula says it."""
    if not has_estimate(config) or not config.model.vocab_size:
        return [None] * topology.world_size
    return [asdict(each) | {"peak": each.peak} for each in estimates_by_rank(config, topology)]


def print_places(config: RunConfig, topology: Topology) -> None:
    """Print nothing if all lies on the device, without a limit."""
    memory = config.train.memory
    if memory.is_default:
        return
    placed = placed_by_rank(config, topology)
    rows = [
        [rank, *map(format_bytes, (each.device, each.host, each.file, each.staging))]
        for rank, each in enumerate(placed)
    ]
    print_table(rows, ["rank", "device", "host", "file", "of it pieces of an update"])
    print(
        f"train.memory: optimizer {memory.optimizer}, gradients {memory.gradients}, "
        f"parameters {memory.parameters}, activations {memory.activations}; all buffers of sums "
        "lie with gradients"
    )
    if memory.limit:
        most = max(each.device for each in placed)
        words = "within" if most <= memory.limit else "MORE THAN"
        print(
            f"state on a device, at most {format_bytes(most)}: {words} "
            f"train.memory.device_gb {memory.device_gb:g}, without activations"
        )


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

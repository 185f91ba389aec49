"""Iterations that Megatron's authors published, on A100-80 in nodes of 8, with TP 8 in a node.

Eight times are of Korthikanti et al. (2205.05198), table 5: full recomputation, and selective with
sequence parallelism. Three are of Megatron-Turing NLG (2201.11990). Attention was not fused then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from benchmarks.runtime.plan_fidelity.architectures import ARCHITECTURES
from benchmarks.runtime.plan_fidelity.case import Case
from benchmarks.runtime.plan_fidelity.rows import pool_of
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.workload import Layer, StateBytes, Workload
from holdfast.plan.hardware.cluster import Cluster
from holdfast.plan.hardware.devices import DeviceType

SEQUENCE = 2048
TP = 8


@dataclass(frozen=True)
class Published:
    """seconds: of an iteration. dp: replicas."""

    model: str
    dp: int
    pp: int
    virtual: int
    batch: int
    microbatch: int
    recompute: str
    seconds: float


_SIZES = (
    ("22b", 1, 1, 4, 4),
    ("175b", 8, 3, 64, 1),
    ("530b", 35, 3, 280, 1),
    ("1t", 64, 1, 512, 1),
)
_FULL, _SELECTIVE = (1.42, 18.13, 49.05, 94.42), (1.10, 13.75, 37.83, 71.49)
EIGHT = tuple(
    Published(model, 1, pp, chunks, batch, microbatch, word, seconds)
    for (model, pp, chunks, batch, microbatch), times in zip(
        _SIZES, zip(_FULL, _SELECTIVE, strict=True), strict=True
    )
    for word, seconds in zip(("full", "selective"), times, strict=True)
)
NLG = tuple(
    Published("530b", dp, 35, 1, 1920, 1, "full", seconds)
    for dp, seconds in ((8, 60.1), (10, 50.2), (12, 44.4))
)


def cases_of(published: tuple[Published, ...], devices: Mapping[str, DeviceType]) -> list[Case]:
    """The rows as the planner sees them."""
    return [_case(row, devices["A100-80"]) for row in published]


def _case(row: Published, device: DeviceType) -> Case:
    shape = ARCHITECTURES["gpt3" + row.model]
    layers = tuple(map(_not_fused, shape.layers(SEQUENCE)))
    workload = Workload(
        row.model,
        layers,
        SEQUENCE,
        row.batch,
        state=StateBytes(),
        vocabulary=shape.vocabulary,
        is_tied=shape.is_tied,
        repeats_all=True,
    )
    gpus = row.dp * row.pp * TP
    stages = tuple(_even(shape.depth, row.pp * row.virtual))
    microbatches = row.batch // row.dp // row.microbatch
    replica = ReplicaChoice(
        row.dp, row.pp, 1, 1, TP, stages, ("rows",), microbatches, (row.recompute,)
    )
    schedule = "interleaved" if row.virtual > 1 else "1f1b"
    choice = Choice(
        (replica,),
        row.microbatch,
        schedule,
        row.virtual,
        sequence_parallel=row.recompute == "selective",
    )
    return Case(
        "2205.05198" if row.dp == 1 else "2201.11990",
        f"{row.model} on {gpus}, TP {TP} PP {row.pp} x {row.virtual}, {row.recompute}",
        row.model,
        device.name,
        workload,
        Cluster((pool_of(device, gpus),)),
        choice,
        workload.step_tokens / row.seconds / gpus,
        6 * workload.parameters + 12 * shape.depth * shape.dim * SEQUENCE,
    )


def _not_fused(layer: Layer) -> Layer:
    if layer.attention is None:
        return layer
    return replace(layer, attention=replace(layer.attention, is_fused=False))


def _even(depth: int, stages: int) -> Iterator[int]:
    """Blocks of each stage, the first ones with one more."""
    for stage in range(stages):
        yield depth // stages + (stage < depth % stages)

"""Rows of torchtitan's reports (docs of Llama 3.1, H100 with 96 GB at 500 W), as the planner sees
them. They have no bar: eager and compiled code, and float8 on a part of the products, are mixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.runtime.plan_fidelity.architectures import ARCHITECTURES
from benchmarks.runtime.plan_fidelity.case import Case
from benchmarks.runtime.plan_fidelity.rows import pool_of
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.workload import StateBytes, Workload
from holdfast.plan.hardware.cluster import Cluster
from holdfast.plan.hardware.devices import DeviceType


@dataclass(frozen=True)
class Reported:
    """samples: of one dp rank and step. dp: ranks of FSDP. cp divides them further."""

    model: str
    dp: int
    tp: int
    pp: int
    cp: int
    virtual: int
    samples: int
    sequence: int
    precision: str
    recompute: str
    measured: float


ROWS = (
    Reported("8b", 8, 1, 1, 1, 1, 2, 8192, "bf16", "selective", 6667),
    Reported("8b", 8, 1, 1, 1, 1, 2, 8192, "fp8", "selective", 8532),
    Reported("8b", 128, 1, 1, 1, 1, 2, 8192, "bf16", "selective", 6514),
    Reported("8b", 128, 1, 1, 1, 1, 2, 8192, "fp8", "selective", 8380),
    Reported("8b", 8, 1, 1, 1, 1, 1, 32768, "fp8", "full", 3890),
    Reported("8b", 4, 1, 1, 2, 1, 1, 65536, "fp8", "full", 2540),
    Reported("8b", 2, 1, 1, 4, 1, 1, 131072, "fp8", "full", 1071),
    Reported("8b", 1, 1, 1, 8, 1, 1, 262144, "fp8", "full", 548),
    Reported("8b", 8, 8, 1, 1, 1, 12, 8192, "bf16", "selective", 4378),
    Reported("8b", 8, 8, 1, 1, 1, 12, 8192, "fp8", "selective", 5078),
    Reported("70b", 32, 8, 1, 1, 1, 16, 8192, "bf16", "full", 597),
    Reported("70b", 32, 8, 1, 1, 1, 16, 8192, "fp8", "full", 829),
    Reported("405b", 8, 8, 8, 1, 1, 32, 8192, "fp8", "full", 100),
    Reported("405b", 8, 8, 8, 1, 2, 32, 8192, "fp8", "full", 128),
    Reported("405b", 8, 8, 8, 1, 1, 8, 32768, "fp8", "full", 76),
    Reported("405b", 4, 8, 8, 2, 1, 8, 65536, "fp8", "full", 47),
)


def cases_of(devices: Mapping[str, DeviceType]) -> list[Case]:
    """The rows as the planner sees them."""
    return [_case(row, devices["H100-96"]) for row in ROWS]


def _case(row: Reported, device: DeviceType) -> Case:
    shape = ARCHITECTURES["llama3" + row.model]
    gpus = row.dp * row.tp * row.pp * row.cp
    workload = Workload(
        row.model,
        shape.layers(row.sequence),
        row.sequence,
        row.samples * row.dp,
        row.precision,
        state=StateBytes(touched=40.0),
        vocabulary=shape.vocabulary,
    )
    microbatches = row.samples if row.pp > 1 else 1
    number = row.pp * row.virtual
    stages = tuple(
        shape.depth // number + (stage < shape.depth % number) for stage in range(number)
    )
    replica = ReplicaChoice(
        1, row.pp, row.dp, row.cp, row.tp, stages, ("rows",), microbatches, (row.recompute,)
    )
    schedule = "interleaved" if row.virtual > 1 else "1f1b"
    choice = Choice((replica,), row.samples * row.dp // microbatches, schedule, row.virtual, 3)
    return Case(
        "torchtitan",
        f"Llama 3.1 {row.model} S {row.sequence} {row.precision} on {gpus}: FSDP {row.dp} TP "
        f"{row.tp} PP {row.pp} x {row.virtual} CP {row.cp}, {row.recompute}",
        row.model,
        device.name,
        workload,
        Cluster((pool_of(device, gpus),)),
        choice,
        row.measured,
        3 * shape.flops(row.sequence),
    )

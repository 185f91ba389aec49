"""Rows of llm-foundry's runs of FSDP, as the planner sees them.

The rows do not state some facts, which are assumed for all. Nodes have 8 devices, and each device
has one network card. Gradients are summed in fp32 (mode PURE: bf16). The optimizer is not fused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.runtime.plan_fidelity.architectures import MPT, Architecture, named, of_parameters
from benchmarks.runtime.plan_fidelity.case import Case
from benchmarks.runtime.plan_fidelity.rows import Row, device_of, pool_of
from holdfast.errors import DataError
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.workload import StateBytes, Workload
from holdfast.plan.hardware.cluster import Cluster
from holdfast.plan.hardware.devices import DeviceType

NEEDED = ("Model", "SeqLen (T)", "# GPUs", "GPU", "MicroBatchSize", "Precision")
PRECISIONS = {"bf16": "bf16", "amp_bf16": "bf16", "fp16": "bf16", "amp_fp16": "bf16"}
PRECISIONS |= {"amp_fp8": "fp8", "fp8": "fp8", "fp32": "fp32"}

TOUCHED = 96.0
"""Bytes of a parameter that torch's Adam reads and writes without fused kernels, in twelve kernels
with the clipping of gradients."""


def cases_of(rows: Sequence[Row], devices: Mapping[str, DeviceType]) -> list[Case]:
    """Raises DataError for a row that cannot be used."""
    return [_case(row, devices) for row in rows]


def _case(row: Row, devices: Mapping[str, DeviceType]) -> Case:
    device = device_of(row, row.text("GPU"), devices)
    gpus, sequence = row.whole("# GPUs"), row.whole("SeqLen (T)")
    microbatch = row.whole("MicroBatchSize")
    accumulated = row.whole("GradAccum", default=1)
    model, precision = row.text("Model"), _precision(row, device)
    shape = _shape(row, model, sequence)
    layers = shape.layers(sequence)
    is_pure = row.text("MP Mode").upper() == "PURE"
    workload = Workload(
        model,
        layers,
        sequence,
        microbatch * accumulated * gpus,
        precision,
        4.0 if precision == "fp32" else 2.0,
        StateBytes(2.0, 2.0 if is_pure else 4.0, 12.0, TOUCHED),
        shape.vocabulary,
        shape.is_tied,
    )
    recompute = "full" if row.text("Activation Checkpointing").lower() == "true" else "none"
    replica = ReplicaChoice(1, 1, gpus, 1, 1, (shape.depth,), ("rows",), accumulated, (recompute,))
    zero = 2 if row.text("Sharding Strategy") == "SHARD_GRAD_OP" else 3
    choice = Choice((replica,), microbatch * gpus, zero=zero)
    return Case(
        row.place,
        f"{model} S {sequence} on {gpus} {device.name} {precision} microbatch {microbatch} "
        f"x {accumulated}, recompute {recompute}",
        model,
        device.name,
        workload,
        Cluster((pool_of(device, gpus),)),
        choice,
        _measured(row, gpus, sequence),
        6 * workload.parameters + 12 * shape.depth * shape.dim * sequence,
        (shape.note,) if shape.note else (),
    )


def _precision(row: Row, device: DeviceType) -> str:
    word = row.text("Precision").lower()
    if word not in PRECISIONS:
        raise DataError(
            f"the precision {word!r} is not known",
            where=row.place,
            remedy=f"use one of {', '.join(PRECISIONS)}",
        )
    if PRECISIONS[word] not in device.flops:
        raise DataError(
            f"{device.name} has no {PRECISIONS[word]}",
            where=row.place,
            remedy=f"use one of {', '.join(device.flops)}",
        )
    return PRECISIONS[word]


def _shape(row: Row, model: str, sequence: int) -> Architecture:
    """By name if the number of parameters agrees within 3 percent, or from that number."""
    shape = MPT.get(model.lower().removeprefix("mpt-").removeprefix("mpt")) or named(model)
    number = row.number("NumParams", default=0.0)
    if shape is not None:
        workload = Workload(model, shape.layers(sequence), sequence, 1, is_tied=shape.is_tied)
        if not number or abs(workload.parameters / number - 1) < 0.03:
            return shape
    if not number:
        raise DataError(
            f"the model {model!r} is not known and 'NumParams' is empty or missing",
            where=row.place,
            remedy="state its number of parameters in 'NumParams'",
        )
    return of_parameters(number, 50368, sequence)


def _measured(row: Row, gpus: int, sequence: int) -> float:
    """Tokens/s of a device. Sequences/s are rounded to whole numbers, so they come last."""
    each = row.number("Throughput (T/s/GPU)", default=0.0)
    every = row.number("Throughput (T/s)", default=0.0)
    if each or every:
        return each or every / gpus
    return row.number("Throughput (S/s)") * sequence / gpus

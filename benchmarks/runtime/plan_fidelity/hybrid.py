"""Rows of Megatron-Bridge's performance summary, as the planner sees them.

The rows do not state some facts, which are assumed for all. Optimizer states are shared (ZeRO 1),
gradients are summed in 16 bits, nothing is recomputed. GB200 and GB300 have racks of 64 devices on
one NVLink, the rest has nodes of 8. Rows of fine-tuning are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.runtime.plan_fidelity.architectures import (
    Architecture,
    named,
    of_parameters,
    with_experts,
)
from benchmarks.runtime.plan_fidelity.case import Case
from benchmarks.runtime.plan_fidelity.rows import Row, device_of, pool_of
from holdfast.errors import DataError
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.workload import StateBytes, Workload
from holdfast.plan.hardware.cluster import Cluster
from holdfast.plan.hardware.devices import DeviceType

NEEDED = ("model", "System", "gpus", "Precision", "GBS", "MBS", "Sequence Length", "TP", "PP")
FUSED_SINCE = (26, 6)
PRECISIONS = {"bf16": "bf16", "fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}


def cases_of(rows: Sequence[Row], devices: Mapping[str, DeviceType]) -> list[Case]:
    """Raises DataError for a row that cannot be used, or if all rows are of fine-tuning."""
    used = [row for row in rows if "phase" not in row.cells or row.text("phase")]
    if not used:
        raise DataError(
            "all rows are of fine-tuning (an empty 'phase')",
            where=rows[0].place,
            remedy="give rows of pre-training",
        )
    return [_case(row, devices) for row in used]


def _case(row: Row, devices: Mapping[str, DeviceType]) -> Case:
    device = device_of(row, row.text("System"), devices)
    gpus, sequence = row.whole("gpus"), row.whole("Sequence Length")
    tp, pp, cp = (row.whole(axis, default=1) for axis in ("TP", "PP", "CP"))
    virtual = row.whole("VP", default=1) if pp > 1 else 1
    batch, microbatch = row.whole("GBS"), row.whole("MBS")
    dp = _whole_share(row, "gpus", gpus, "TP x PP x CP", tp * pp * cp)
    microbatches = _whole_share(row, "GBS", batch, "MBS x DP", microbatch * dp)
    ep = min(row.whole("EP", default=1), dp * cp)
    model, precision = row.text("model"), _precision(row, device)
    measured = row.number("tok_s_gpu")
    flops = row.number("tflops_gpu", default=0.0) * 1e12 / measured
    shape = _shape(row, model, flops, ep > 1, sequence)
    if _has_fused_experts(row, device, precision):
        shape = shape.with_fused_experts()
    workload = Workload(
        model,
        shape.layers(sequence),
        sequence,
        batch,
        precision,
        state=StateBytes(gradients=2.0),
        vocabulary=shape.vocabulary,
        is_tied=shape.is_tied,
        repeats_all=True,
    )
    stated = virtual
    while virtual > 1 and pp * virtual > shape.depth:
        virtual //= 2
    notes = [shape.note] if shape.note else []
    if virtual != stated:
        notes.append(f"{model} PP {pp}: VP {stated} taken as {virtual}, as each stage has a block")
    stages = tuple(_shared_out(shape.depth, pp * virtual))
    replica = ReplicaChoice(1, pp, dp, cp, tp, stages, ("rows",), microbatches)
    schedule = "interleaved" if virtual > 1 else "1f1b"
    zero = 3 if row.text("FSDP") not in ("", "0") else 1
    choice = Choice((replica,), microbatch * dp, schedule, virtual, zero, ep)
    return Case(
        row.place,
        f"{model} {row.text('Precision')} on {gpus} {device.name} TP {tp} PP {pp} x {virtual} "
        f"CP {cp} EP {ep} microbatch {microbatch} {row.text('release').split(' ')[0]}",
        model,
        device.name,
        workload,
        Cluster((pool_of(device, gpus),)),
        choice,
        measured,
        flops or 3 * shape.flops(sequence),
        tuple(notes),
    )


def _has_fused_experts(row: Row, device: DeviceType, precision: str) -> bool:
    """Releases from 26.06 on have such kernels for Blackwell and operands in fp8; a row without its
    release counts as one of them."""
    release = re.match(r"(\d+)\.(\d+)", row.text("release"))
    is_new = release is None or (int(release[1]), int(release[2])) >= FUSED_SINCE
    return is_new and precision == "fp8" and device.name.lstrip("G").startswith("B")


def _whole_share(row: Row, name: str, number: int, other: str, divisor: int) -> int:
    if number % divisor:
        raise DataError(
            f"{name} {number} is no multiple of {other} = {divisor}",
            where=row.place,
            remedy=f"state {name} {max(1, number // divisor) * divisor}",
        )
    return number // divisor


def _precision(row: Row, device: DeviceType) -> str:
    word = row.text("Precision").lower()
    found = PRECISIONS.get(word, "")
    if found not in device.flops:
        known = [name for name, kind in PRECISIONS.items() if kind in device.flops]
        raise DataError(
            f"{device.name} has no precision {word!r}",
            where=row.place,
            remedy=f"use one of {', '.join(known)}",
        )
    return found


def _shape(row: Row, model: str, flops: float, has_experts: bool, sequence: int) -> Architecture:
    """By name, or from the FLOPs of a token, or from the size in the name."""
    shape = named(model)
    if shape is not None:
        return shape
    sizes = re.search(r"(\d+(?:\.\d+)?)\s*b(?:[-_ ]*a(\d+(?:\.\d+)?)b)?", model.lower())
    total = float(sizes[1]) * 1e9 if sizes else 0.0
    active = float(sizes[2]) * 1e9 if sizes and sizes[2] else flops / 6 or total
    if not active:
        raise DataError(
            f"the model {model!r} is not known, and its size is not stated",
            where=row.place,
            remedy="name it with its size, like Own-8B or Own-30B-A3B, or state 'tflops_gpu'",
        )
    if has_experts or (sizes and sizes[2]):
        return with_experts(active, total)
    return of_parameters(active, 128256, 0)


def _shared_out(depth: int, stages: int) -> Iterator[int]:
    """Blocks of each stage. The last and the first have one less where the number does not divide:
    they have the head and the embedding. Then those next to them."""
    most = -(-depth // stages)
    missing = most * stages - depth
    order = [stages - 1, *range(stages - 1)]
    fewer = set(order[:missing])
    for stage in range(stages):
        yield most - (stage in fewer)

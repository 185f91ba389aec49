"""Rules for pipelines, to the extent that the run file alone decides them.

Each returns the sentence of a violated rule, or "". `config/sections/degrees.py` asks them.
"""

from __future__ import annotations

from holdfast.config.sections.layout import DegreesConfig, LayoutConfig
from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.config.sections.train import TrainConfig


def check_pipeline(key: str, degrees: DegreesConfig, layout: LayoutConfig, layers: int) -> str:
    """Check that every stage holds at least one block, and named stages hold all blocks."""
    pp, stages = degrees.pp, list(degrees.stages)
    number = pp * layout.stages_a_worker if pp > 1 else 1
    if pp > layers:
        return f"{key}.pp {pp} is more than model.layers {layers}: use {layers} or less"
    if number > layers:
        return (
            f"{key}.pp {pp} under layout.schedule {layout.schedule} has {number} stages, but "
            f"model.layers is {layers}: use {_fewer_stages(key, pp, layers, layout)}"
        )
    even = [layers // number + (stage < layers % number) for stage in range(number)]
    instead = f"use {even}, or [] to have them balanced by cost"
    if stages and len(stages) != number:
        stages_of = f"{key}.pp {pp}" + (f" x {number // pp}" if number > pp else "")
        return f"{key}.stages {stages} has {len(stages)} of {stages_of} stages: {instead}"
    if stages and sum(stages) != layers:
        return (
            f"{key}.stages {stages} holds {sum(stages)} blocks, but model.layers is {layers}: "
            f"{instead}"
        )
    return ""


def _fewer_stages(key: str, pp: int, layers: int, layout: LayoutConfig) -> str:
    if layout.virtual_stages:
        return f"layout.virtual_stages {layers // pp}"
    fewer = layers // layout.stages_a_worker
    return (f"{key}.pp {fewer}, or " if fewer > 1 else "") + "layout.schedule 1f1b"


def check_virtual_stages(layout: LayoutConfig) -> str:
    """Check that only a schedule that takes a number of stages is given one."""
    if layout.virtual_stages and layout.schedule != "interleaved":
        return (
            f"layout.virtual_stages {layout.virtual_stages} has no effect on layout.schedule "
            f"{layout.schedule}: use layout.schedule interleaved, or virtual_stages 0"
        )
    return ""


def check_balance_costs(layout: LayoutConfig, layers: int) -> str:
    """Check that measured times are of all parts of the model, and are asked for."""
    costs, key = layout.balance_costs, "layout.balance_costs"
    if not costs:
        return ""
    if layout.balance != "time":
        return (
            f"{key} has times, which have no effect on layout.balance {layout.balance}: use "
            f"layout.balance time, or {key} []"
        )
    if len(costs) != layers + 2:
        return (
            f"{key} has {len(costs)} times, but an embedding, {layers} blocks (model.layers) and a "
            f"head are {layers + 2}: use {layers + 2} times, or {key} []"
        )
    return ""


def check_split_backward(
    key: str, degrees: DegreesConfig, layout: LayoutConfig, train: TrainConfig
) -> str:
    """Check what several stages a worker, or a backward in two halves, do not go with.

    FSDP2 (ZeRO 2 and 3) expects one forward and one backward of its root. Compiled blocks cannot
    leave a part of their backward for later.
    """
    name = layout.schedule
    is_split = SCHEDULE_KINDS[name].splits_backward
    if degrees.pp == 1 or not (is_split or layout.stages_a_worker > 1):
        return ""
    if degrees.dp_shard > 1 and layout.zero_in_memory > 1:
        return (
            f"layout.schedule {name} does not work with layout.zero {layout.zero} and "
            f"{key}.dp_shard {degrees.dp_shard}: use {layout.complete_setting}, or layout.schedule "
            "1f1b"
        )
    if is_split and train.compile:
        return (
            f"layout.schedule {name} does not work with train.compile: use train.compile false, or "
            "layout.schedule interleaved"
        )
    return ""

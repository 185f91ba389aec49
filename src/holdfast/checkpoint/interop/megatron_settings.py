"""Optimizer and schedule of a checkpoint of Megatron, as keys of a run file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast.checkpoint.interop.hf_trainer import optimizer_settings

STYLES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "WSD": "wsd"}


def settings_of(
    groups: Sequence[Mapping[str, Any]], schedule: Mapping[str, Any], iteration: int
) -> dict[str, Any]:
    """Return optimizer and schedule as keys of a run file. Megatron counts its schedule in samples,
    and a step has as many of them as all before on average."""
    decayed = [group for group in groups if group.get("wd_mult", 1.0)] or list(groups)
    found = optimizer_settings(decayed[0]) if decayed else {}
    style = STYLES.get(schedule.get("lr_decay_style", ""))
    if not schedule or style is None:
        return found
    peak = float(schedule["max_lr"])
    batch = max(1.0, schedule["num_steps"] / max(1, iteration))
    found["train.optimizer.learning_rate"] = peak
    found["train.optimizer.weight_decay"] = float(schedule["end_wd"])
    found["train.schedule.kind"] = style
    found["train.schedule.warmup_steps"] = round(schedule["lr_warmup_steps"] / batch)
    found["train.schedule.counts_from"] = 0
    if style != "constant":
        found["train.schedule.final_ratio"] = float(schedule["min_lr"]) / peak
        found["train.schedule.steps"] = round(schedule["lr_decay_steps"] / batch)
    return found


def differences(groups: Sequence[Mapping[str, Any]], schedule: Mapping[str, Any]) -> Iterator[str]:
    style = schedule.get("lr_decay_style", "")
    if schedule and style not in STYLES:
        yield f"lr_decay_style is {style} there, and no train.schedule.kind is"
    if style == "WSD":
        yield "the decay of the schedule WSD is not stored; say it in train.schedule.decay_steps"
    if schedule.get("start_wd") != schedule.get("end_wd"):
        yield f"the weight decay rises there from {schedule['start_wd']} to {schedule['end_wd']}"
    for key, plain in (("lr_mult", 1.0), ("is_decoupled_lr", False)):
        if any(group.get(key, plain) != plain for group in groups):
            yield f"{key} of some parameters is not {plain} there; see train.optimizer.groups"

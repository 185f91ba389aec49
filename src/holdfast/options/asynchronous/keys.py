"""Schedules of a pipeline that is not emptied between steps: PipeDream, PipeDream-2BW, PipeMare."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from holdfast.config.sections.memory import MemoryConfig
from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.options.protocols import Checked, Keys, Rule

if TYPE_CHECKING:
    from holdfast.config.sections.layout import DegreesConfig, LayoutConfig
    from holdfast.config.sections.model import ModelConfig
    from holdfast.config.sections.train import TrainConfig

PipemareSteps = Annotated[
    int,
    Field(
        ge=0,
        description="with schedule pipemare: steps in which the learning rate of a stage comes up "
        "to that of the run; 0: a quarter of train.steps",
    ),
]
PipemareDecay = Annotated[
    float,
    Field(
        gt=0,
        lt=1,
        description="with schedule pipemare: what is left of a movement in the mean movement of "
        "the weights, after as many steps as a gradient is late",
    ),
]


class OptionKeys(Keys):
    key: ClassVar[str] = "layout.schedule"

    def is_used(self, section: Any) -> bool:
        return SCHEDULE_KINDS[section.schedule].is_asynchronous

    def refuse_replica(self, run: Checked, key: str, degrees: DegreesConfig) -> str:
        """Check what does not go with a pipeline that is not emptied between steps.

        Its forwards compute with copies of the weights, and a scale of the loss would change
        between a backward and its step.
        """
        layout, model, train, name = run.layout, run.model, run.train, run.layout.schedule
        if degrees.pp == 1 or not run.has_decoder or not self.is_used(layout):
            return ""
        does_not = f"layout.schedule {name} does not work with"
        if run.cuts is not None:
            return f"{does_not} lora.rank: use layout.schedule 1f1b"
        if layout.replicas:
            return (
                f"{does_not} layout.replicas, as each kind of replica would be late by another "
                "number of steps: use layout.replicas [], or layout.schedule 1f1b"
            )
        if degrees.dp_shard > 1 and layout.zero > 1:
            return (
                f"{does_not} layout.zero {layout.zero} and {key}.dp_shard {degrees.dp_shard}: use "
                + (f"{key}.dp_shard 1" if name == "pipemare" else "layout.zero 1")
                + ", or layout.schedule 1f1b"
            )
        if name == "pipemare" and (refused := _refuse_pipemare(key, degrees, model, train)):
            return f"{does_not} {refused}, or layout.schedule pipedream-2bw"
        if train.compile:
            return f"{does_not} train.compile: use train.compile false, or layout.schedule 1f1b"
        if train.precision in ("fp16", "fp8"):
            return (
                f"{does_not} train.precision {train.precision}: use train.precision bf16, or "
                "layout.schedule 1f1b"
            )
        if model.experts is not None:
            return f"{does_not} model.experts: use layout.schedule zbv"
        if train.memory != MemoryConfig():
            return f"{does_not} train.memory: remove train.memory, or use layout.schedule 1f1b"
        return ""

    def without_effect(self, layout: LayoutConfig) -> Iterable[Rule]:
        for key in ("layout.pipemare_steps", "layout.pipemare_decay"):
            yield key, not layout.keeps_velocity, f"layout.schedule {layout.schedule}"

    def notices(self, layout: LayoutConfig) -> Iterable[str]:
        if layout.is_asynchronous:
            yield (
                f"layout.schedule {layout.schedule}: gradients are of older weights, so another "
                "layout gives another curve, and so does a start from a checkpoint "
                "(docs/internals/axes.md)"
            )


def _refuse_pipemare(
    key: str, degrees: DegreesConfig, model: ModelConfig, train: TrainConfig
) -> str:
    """Return what PipeMare alone does not work with, and a value that works."""
    if degrees.dp_shard > 1:
        return (
            f"{key}.dp_shard {degrees.dp_shard}, as a worker knows the movement of its own rows "
            f"alone: use {key}.dp_shard 1"
        )
    if model.tied_embeddings:
        return (
            "model.tied_embeddings, as the first and the last stage would move them by other "
            "rates: use model.tied_embeddings false"
        )
    if any(word != "none" for word in train.recompute_words):
        return (
            "train.recompute, which would run blocks again with other weights: use "
            "train.recompute none"
        )
    return ""

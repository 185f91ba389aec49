"""`train.qat`: training with rounded weights, so that little is lost when they are stored so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.options.protocols import Checked, Keys

if TYPE_CHECKING:
    from holdfast.config.sections.layout import DegreesConfig
    from holdfast.config.sections.model import ModelConfig

GROUP = 32
"""Weights of a row that share a scale."""
Qat = Annotated[
    Literal["none", "int4", "int8-int4"],
    Field(
        description="quantisation-aware training, through torchao: a forward pass rounds the "
        "weights of the blocks' linear layers, and a backward pass takes them as they are. int4: "
        "weights in 4 bits, by groups of 32; int8-int4: the same, and inputs in 8 bits by token"
    ),
]


class OptionKeys(Keys):
    key: ClassVar[str] = "train.qat"

    def refuse(self, run: Checked) -> str:
        if not self.is_used(run.train):
            return ""
        return next((f"train.qat {run.train.qat} {what}" for what in _refusals(run)), "")

    def refuse_replica(self, run: Checked, key: str, degrees: DegreesConfig) -> str:
        if not self.is_used(run.train) or degrees.tp == 1:
            return ""
        return (
            f"train.qat {run.train.qat} rounds complete rows, and {key}.tp {degrees.tp} cuts them: "
            "use tp 1, or qat none"
        )


def _refusals(run: Checked) -> Iterator[str]:
    train, layout = run.train, run.layout
    if run.cuts is not None and run.cuts.trained == "lora":
        yield "rounds weights that are trained, and adapters leave them: use qat none"
    if train.precision == "fp8":
        yield "and train.precision fp8 both round: use precision bf16, or qat none"
    if train.precision == "float64":
        yield "has no float64 in torchao: use precision fp32, or qat none"
    if train.compile:
        yield "has not been tried with train.compile: use compile false, or qat none"
    if SCHEDULE_KINDS[layout.schedule].splits_backward:
        yield (
            f"does not work with layout.schedule {layout.schedule}: use schedule 1f1b, or qat none"
        )
    if run.cuts is None:
        if run.model.experts is not None:
            yield "has not been tried with model.experts: use qat none"
        if odd := _odd_width(run.model):
            yield f"needs multiples of {GROUP}, and {odd} is none: use another shape, or qat none"


def _odd_width(model: ModelConfig) -> str:
    widths = {
        "model.dim": model.dim,
        "model.heads x head_dim": model.heads * model.head_size,
        "model.ffn_dim": model.ffn_dim,
    }
    return next((f"{name} {width}" for name, width in widths.items() if width % GROUP), "")

"""`train.optimizer.state_dtype`: what an optimizer's moments are kept in between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from holdfast.errors import nearest_degrees
from holdfast.options.protocols import Checked, Keys

if TYPE_CHECKING:
    from holdfast.config.sections.layout import DegreesConfig
    from holdfast.config.sections.train import TrainConfig

StateDtype = Annotated[
    Literal["fp32", "bf16", "8bit"],
    Field(
        description="adamw, sgd, lion: what a moment is kept in between two steps; fp32: as the "
        "parameters"
    ),
]
BLOCK = 64
"""Elements of a row that share a scale, in 8 bits."""
SMALLEST_IN_8BIT = 4096
"""Elements of a parameter whose state is kept in 8 bits (Dettmers et al., 2022)."""


class OptionKeys(Keys):
    key: ClassVar[str] = "train.optimizer.state_dtype"

    def refuse_train(self, train: TrainConfig) -> str:
        short = train.optimizer.state_dtype
        if train.precision != "float64" or short == "fp32":
            return ""
        return (
            f"optimizer.state_dtype {short} would lose the digits of precision float64: use "
            "optimizer.state_dtype fp32, which keeps float64 there, or precision fp32"
        )

    def refuse_replica(self, run: Checked, key: str, degrees: DegreesConfig) -> str:
        """Check that tp cuts no block of 8-bit state. It cuts rows of `attention.o` and
        `ffn.down`."""
        tp, model, optimizer = degrees.tp, run.model, run.train.optimizer
        if tp == 1 or optimizer.state_dtype != "8bit":
            return ""
        if run.cuts is not None:
            can_be_cut = run.cuts.is_known and run.cuts.parts and not run.train.compile
            if not (can_be_cut or run.has_decoder):
                return ""  # another rule refuses tp
            what = "adapters" if run.has_decoder else "a task"
            return (
                f"{key}.tp {tp} of {what} does not work with train.optimizer.state_dtype 8bit: use "
                "state_dtype bf16"
            )
        if model.experts is not None:
            return (
                f"{key}.tp {tp} cuts blocks of train.optimizer.state_dtype 8bit in experts: use tp "
                "1, or state_dtype bf16"
            )
        widths = {
            "model.heads x model.head_dim": model.heads * model.head_size,
            "model.ffn_dim": model.ffn_dim,
        }

        def cut(degree: int) -> list[str]:
            return [
                name
                for (name, width), n in zip(
                    widths.items(), run.layout.tp_parts(degree), strict=True
                )
                if n > 1 and optimizer.is_in_8bit((model.dim, width)) and width % (n * BLOCK)
            ]

        if not (names := cut(tp)):
            return ""
        near = nearest_degrees(tp, lambda d: not cut(d), model.heads)
        return (
            f"{key}.tp {tp} cuts blocks of {BLOCK} elements of train.optimizer.state_dtype 8bit: "
            f"{names[0]} {widths[names[0]]} is no multiple of {tp} x {BLOCK}: use tp {near}, or "
            "state_dtype bf16"
        )

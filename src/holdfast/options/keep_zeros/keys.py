"""`train.keep_zeros`: weights of matrices that are zero stay zero."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.options.protocols import Checked, Keys

KeepZeros = Annotated[
    bool,
    Field(
        description="a weight of a matrix that is zero stays zero, and its gradient counts for "
        "nothing: for a model of `holdfast prune`"
    ),
]


class OptionKeys(Keys):
    key: ClassVar[str] = "train.keep_zeros"

    def refuse(self, run: Checked) -> str:
        if not self.is_used(run.train):
            return ""
        if run.cuts is not None and run.cuts.trained == "lora":
            return (
                "train.keep_zeros is for the weights of a model, and adapters begin with zeros: "
                "use keep_zeros false"
            )
        if run.train.memory.moves_state:
            return (
                "train.keep_zeros has not been tried with state outside of the device: use "
                "keep_zeros false, or train.memory without places"
            )
        if SCHEDULE_KINDS[run.layout.schedule].is_asynchronous:
            return (
                f"train.keep_zeros has not been tried with layout.schedule {run.layout.schedule}: "
                "use keep_zeros false, or schedule 1f1b"
            )
        return ""

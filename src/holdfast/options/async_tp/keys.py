"""`layout.async_tp`: exchanges of one half of the samples behind the products of the other half."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from holdfast.options.protocols import Checked, Keys, Rule

if TYPE_CHECKING:
    from holdfast.config.sections.layout import DegreesConfig, LayoutConfig

AsyncTp = Annotated[
    bool,
    Field(
        description="with tp: a microbatch goes through each block in two halves of its samples. "
        "Gathers and scatters of one half travel during the products of the other"
    ),
]


class OptionKeys(Keys):
    key: ClassVar[str] = "layout.async_tp"

    def refuse(self, run: Checked) -> str:
        """Check that there is code for all that the run asks for with it."""
        layout, train = run.layout, run.train
        if not layout.async_tp or all(degrees.tp == 1 for _, degrees in layout.kinds):
            return ""
        for beside, is_there, use in (
            ("a task or adapters", run.cuts is not None, ""),
            ("model.experts", run.model.experts is not None, ""),
            (
                "layout.sequence_parallel false",
                not layout.sequence_parallel,
                "layout.sequence_parallel true",
            ),
            ("train.compile true", train.compile, "train.compile false"),
            ("train.recompute", train.recomputes, "train.recompute none"),
            ("train.precision fp8", train.precision == "fp8", "train.precision bf16"),
        ):
            if is_there:
                other = f", or {use}" if use else ""
                return (
                    f"layout.async_tp true does not work with {beside}: use layout.async_tp "
                    f"false{other}"
                )
        return ""

    def refuse_replica(self, run: Checked, key: str, degrees: DegreesConfig) -> str:
        if not run.layout.async_tp or degrees.tp == 1:
            return ""
        for axis in ("pp", "cp"):
            if getattr(degrees, axis) > 1:
                return (
                    f"layout.async_tp true does not work with {key}.{axis} "
                    f"{getattr(degrees, axis)}: use layout.async_tp false, or {key}.{axis} 1"
                )
        samples, pairs = run.train.microbatch_size, 2 * degrees.dp_shard
        if samples % pairs:
            return (
                f"layout.async_tp true halves the samples of a worker, and train.microbatch_size "
                f"{samples} gives it an odd number: use layout.async_tp false, or "
                f"train.microbatch_size {-(-samples // pairs) * pairs}"
            )
        return ""

    def without_effect(self, layout: LayoutConfig) -> Iterable[Rule]:
        is_cut = any(degrees.tp > 1 for _, degrees in layout.kinds)
        return [("layout.async_tp", not is_cut, "layout.tp 1")]

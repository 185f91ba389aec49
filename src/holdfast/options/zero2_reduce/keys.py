"""`layout.zero2_reduce`: when shards add up their gradients, with ZeRO 2."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from holdfast.options.protocols import Checked, Keys, Rule

if TYPE_CHECKING:
    from holdfast.config.sections.layout import LayoutConfig

SumInterval = Annotated[
    Literal["microbatch", "step"],
    Field(
        description="with zero 2: when shards add up their gradients. microbatch: after each, so "
        "a worker holds its part of the sum. step: once; less is sent, and complete sums are held"
    ),
]


class OptionKeys(Keys):
    key: ClassVar[str] = "layout.zero2_reduce"

    def refuse(self, run: Checked) -> str:
        layout, has_experts = run.layout, run.model.experts is not None and run.cuts is None
        if layout.ep == 1 or not has_experts or layout.zero == 1 or layout.zero_in_memory > 1:
            return ""
        return (
            f"layout.ep {layout.ep} does not work with layout.zero2_reduce step, which holds all "
            "experts: use layout.zero2_reduce microbatch"
        )

    def without_effect(self, layout: LayoutConfig) -> Iterable[Rule]:
        setting = f"layout.zero {layout.zero}" if layout.zero != 2 else "layout.dp_shard 1"
        is_cut = any(degrees.dp_shard > 1 for _, degrees in layout.kinds)
        return [("layout.zero2_reduce", layout.zero != 2 or not is_cut, setting)]

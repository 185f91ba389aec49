"""`layout.quantized`: what shards send each other as codes of few bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from holdfast.options.protocols import Checked, Keys

if TYPE_CHECKING:
    from holdfast.config.sections.layout import LayoutConfig

Quantized = Annotated[
    Literal["none", "weights", "gradients", "both"],
    Field(
        description="what dp_shard sends as codes of few bits, with zero 2 or 3: weights 8 bits, "
        "gradients 4. The curve then depends on dp_shard"
    ),
]
_SENT = {
    "weights": "weights in 8 bits",
    "gradients": "gradients in 4 bits",
    "both": "weights in 8 bits and gradients in 4",
}


class OptionKeys(Keys):
    key: ClassVar[str] = "layout.quantized"

    def refuse(self, run: Checked) -> str:
        layout = run.layout
        if not self.is_used(layout):
            return ""
        key = f"layout.quantized {layout.quantized}"
        if not layout.cuts_parameters:
            return (
                f"{key} is for what shards send; only layout.zero 2 or 3 with dp_shard above 1 has "
                "any (not zero2_reduce step): use layout.quantized: none"
            )
        if layout.ep > 1:
            return (
                f"{key} has not been tried with layout.ep {layout.ep}: use layout.quantized: none"
            )
        return ""

    def notices(self, layout: LayoutConfig) -> Iterable[str]:
        if self.is_used(layout):
            yield (
                f"layout.quantized {layout.quantized}: shards send each other "
                f"{_SENT[layout.quantized]}, so another layout gives another curve "
                "(docs/guide/accelerators.md)"
            )

"""What the planner knows of codes of few bits: nothing."""

from __future__ import annotations

from typing import ClassVar

from holdfast.config.run import RunConfig
from holdfast.options.protocols import Cost


class OptionCost(Cost):
    formula_key: ClassVar[str] = "layout.quantized"

    def unmodelled(self, config: RunConfig) -> str:
        value = config.layout.quantized
        return "" if value == "none" else f"{self.formula_key} {value}"

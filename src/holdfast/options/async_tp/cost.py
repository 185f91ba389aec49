"""What the planner knows of exchanges that hide behind products: nothing. Memory is as without."""

from __future__ import annotations

from typing import ClassVar

from holdfast.config.run import RunConfig
from holdfast.options.protocols import Cost


class OptionCost(Cost):
    formula_key: ClassVar[str] = "layout.async_tp"

    def unmodelled(self, config: RunConfig) -> str:
        return "layout.async_tp true" if config.layout.async_tp else ""

    def has_formula(self, config: RunConfig) -> bool:
        return True

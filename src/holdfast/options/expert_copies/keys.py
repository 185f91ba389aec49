"""`layout.expert_replicas`: copies of hot experts on other workers."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from holdfast.options.protocols import Checked, Keys

ExpertReplicas = Annotated[
    Literal["off", "auto"],
    Field(
        description="with ep: auto gives experts with many tokens copies on workers with few, in "
        "each microbatch"
    ),
]


class OptionKeys(Keys):
    key: ClassVar[str] = "layout.expert_replicas"

    def refuse(self, run: Checked) -> str:
        layout = run.layout
        if layout.ep > 1 or not self.is_used(layout):
            return ""
        return (
            f"layout.expert_replicas {layout.expert_replicas} needs experts on several workers, "
            "and layout.ep is 1: use layout.expert_replicas off"
        )

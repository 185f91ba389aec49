"""What copies of hot experts cost (`apply.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from holdfast.config.run import RunConfig
from holdfast.core.sharding.state_table import ITEM_BYTES, MIXED, STATE_DTYPE
from holdfast.layout import Coordinate, Replica, Topology
from holdfast.options.protocols import Cost, Formatting, PicturePart


class OptionCost(Cost):
    shown_after: ClassVar[PicturePart] = "activations"
    formula_key: ClassVar[str] = "layout.expert_replicas"

    def has_formula(self, config: RunConfig) -> bool:
        return config.model.experts is None or config.layout.expert_replicas == "off"

    def describe(
        self, config: RunConfig, topology: Topology, formatting: Formatting
    ) -> Iterable[str]:
        """Return what they cost on the rank that may have most."""
        if config.layout.expert_replicas != "auto":
            return
        kinds = {each.kind: each for each in topology.replicas}.values()
        most, one = 0, 0
        for replica in kinds:
            one = max(one, copy_bytes(config, replica.degree("tp")))
            places = (topology.coordinate(rank) for rank in replica.ranks)
            most = max(most, *(most_copies(config, replica, at) for at in places))
        size = formatting.format_bytes(one)
        yield (
            f"copies of hot experts: at most {most} on a rank for each microbatch in flight, "
            f"{formatting.format_bytes(most * one)}. Each sends {size} in the forward pass and as "
            "much in the backward"
        )


def copy_bytes(config: RunConfig, tp: int) -> int:
    """Bytes of a copy on its host. As many travel there, and its gradient's as many back. Of the
    three matrices tp cuts the inner dim."""
    model, precision = config.model, config.train.precision
    item = 2 if precision in MIXED else ITEM_BYTES[STATE_DTYPE[precision]]
    return 3 * model.dim * (model.inner_dim // tp) * item


def most_copies(config: RunConfig, replica: Replica, at: Coordinate) -> int:
    """The copies that a rank may have of one microbatch: one in each of its blocks of experts."""
    blocks = replica.blocks(at.pp) or range(config.model.layers)
    return sum(config.model.has_experts(block) for block in blocks)

"""What copies of hot experts cost (`parallel/axes/expert_replicas.py`)."""

from __future__ import annotations

from holdfast.config.run import RunConfig
from holdfast.core.sharding.state_table import ITEM_BYTES, MIXED, STATE_DTYPE
from holdfast.layout import Coordinate, Replica


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

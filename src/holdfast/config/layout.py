"""`layout:` how many workers and what each holds. Free to change between restarts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from holdfast.config.base import Section


class LayoutConfig(Section):
    workers: int = Field(0, ge=0, description="0: one per accelerator, or one on a CPU (planned)")
    dp_shard: int = Field(1, ge=1, description="workers that share one copy of the state (FSDP2)")
    zero: Literal[2, 3] = Field(
        3,
        description="of dp_shard: 3 gives gathered parameters back after the forward; 2 keeps them "
        "for the backward: more memory, one gather less",
    )
    reduction: Literal["tree", "fast"] = Field(
        "tree", description="tree: bit-equal on any number of replicas; fast: the backend's own"
    )
    bucket_mb: float = Field(6.6, gt=0, description="gradient bytes reduced at a time, in MB")

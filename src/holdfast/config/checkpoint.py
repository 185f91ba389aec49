"""`checkpoint:` when state is saved and how long it is kept."""

from __future__ import annotations

from pydantic import Field

from holdfast.config.base import Section


class CheckpointConfig(Section):
    every_steps: int = Field(50, ge=0, description="0: only when leaving and at the end")
    every_seconds: float = Field(0, ge=0, description="0: by steps only")
    keep_last: int = Field(3, ge=1, description="newest checkpoints that are kept")
    keep_every: int = Field(0, ge=0, description="also keep each step that this divides; 0: none")
    slots: int = Field(2, ge=2, le=3, description="snapshots that fit into the arena at a time")
    extent_mb: int = Field(16, ge=1, description="bytes under one checksum, in MiB")

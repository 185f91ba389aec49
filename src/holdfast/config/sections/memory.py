"""The section `train.memory`: the places of a rank's state, and how much of a device it may use.

The names are those of ZeRO-Offload (Ren et al., 2021) and ZeRO-Infinity (Rajbhandari et al., 2021).
None of these keys changes a bit of the curve.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Literal

from pydantic import Field

from holdfast.config.sections.base import Section

Place = Literal["device", "host", "file"]
DEVICE, HOST, FILE = "device", "host", "file"
PLACES: tuple[Place, ...] = ("device", "host", "file")
GB = 10**9
MOVABLE = ("optimizer", "gradients", "parameters")
"""Keys that name a place of state."""


class MemoryConfig(Section):
    """A place is `device`, `host` (memory of the machine) or `file` (a file in `folder`).
    [memory.md](../guide/memory.md) describes what lies where."""

    device_gb: float = Field(0, ge=0)
    """GB that a rank may use of its device, at most; a step that needs more ends the run. On a CPU
    these bytes are counted. 0: no limit"""
    optimizer: Place = "device"
    """place of AdamW's moments, and of the fp32 parameters if the model computes on copies; updated
    on the device, piece by piece"""
    gradients: Place = Field("device", description="place of the sums of gradients")
    parameters: Place = "device"
    """place of the shards of parameters between uses (layout.zero 2 or 3); each block is gathered
    on the device"""
    activations: Place = "device"
    """place of what blocks keep for the backward pass; it is brought back one block ahead"""
    folder: str = Field("", description="existing folder of the files, on a local disk (NVMe)")
    piece_mb: float = Field(16, gt=0)
    """MB of one tensor that an update copies at a time"""
    update: Literal["device", "host"] = "device"
    """where AdamW runs if state was moved; host: fewer bytes move, and on an accelerator the bits
    are those of the host's processor"""

    def broken_rules(self) -> Iterator[str]:
        for key in (*MOVABLE, "activations"):
            if getattr(self, key) == FILE and not self.folder:
                yield f"{key} file needs a folder: use {key}: host, or name one in memory.folder"

    @property
    def is_default(self) -> bool:
        """Return True if all lies on the device, without a limit."""
        return not (self.device_gb or self.moves_state or self.moves_activations)

    @property
    def moves_state(self) -> bool:
        """Return True if an update has to bring something to the device."""
        return any(getattr(self, key) != DEVICE for key in MOVABLE)

    @property
    def moves_activations(self) -> bool:
        """Return True if what blocks keep does not stay on the device."""
        return self.activations != DEVICE

    @property
    def limit(self) -> int:
        """Bytes of the device; 0: no limit."""
        return ceil(self.device_gb * GB)

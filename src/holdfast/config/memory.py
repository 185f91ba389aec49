"""The section `train.memory`: how much of a device a rank may use."""

from __future__ import annotations

from pydantic import Field

from holdfast.config.base import Section

GB = 10**9


class MemoryConfig(Section):
    """[memory.md](memory.md) describes what needs memory."""

    device_gb: float = Field(
        0,
        ge=0,
        description="GB that a rank may use of its device: what train.microbatch_size auto stays "
        "below. 0: all that the device has",
    )

    @property
    def limit(self) -> int:
        """Bytes of the device; 0: no limit."""
        return int(self.device_gb * GB)

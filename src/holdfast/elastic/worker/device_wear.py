"""When another process must take a worker's place, because groups leave device memory behind."""

from __future__ import annotations

import logging

import torch

from holdfast.core.devices import DeviceKind
from holdfast.parallel.comm import devices

logger = logging.getLogger(__name__)

_SPACING = 4
"""Generations between the replacements of two ranks: one makes two, a loss and a return. So other
ranks still have the state."""


class DeviceWear:
    """What the groups of a process have taken of its device.

    kind: of the device. regroups: generations that the process has joined.
    """

    def __init__(self, kind: DeviceKind) -> None:
        self._kind = kind
        self.regroups = 0
        self._first_bytes: int | None = None
        self._grown_bytes = 0

    def read_memory(self, device: torch.device) -> None:
        """Read the device's memory. Call it when the groups of a generation are made."""
        if not self._kind.regroup_growth_bytes:
            return
        used = devices.memory_outside_torch(device)
        if self._first_bytes is None:
            self._first_bytes = used
        self._grown_bytes = used - self._first_bytes
        logger.info(
            "next to the tensors %d MiB of %s are used, %d MiB more than at first",
            *(used >> 20, device, self._grown_bytes >> 20),
        )

    def is_worn(self, rank: int) -> bool:
        """Return True if the device bears no more groups of this process. Ranks come to that one
        after another."""
        most, limit = self._kind.regroups_per_process, self._kind.regroup_growth_bytes
        later = _SPACING * max(0, rank)
        if most and self.regroups >= most + later:
            return True
        return bool(limit) and self._grown_bytes > limit * (1 + later / (most or 32))

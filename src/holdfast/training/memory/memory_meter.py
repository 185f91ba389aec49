"""Samples the memory of a worker, a few times a minute: for the report, and to see a leak."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import torch

from holdfast.events import MemoryUsed

SAMPLE_INTERVAL_S = 10.0


class MemoryMeter:
    """The samples of one rank. A look costs some ten microseconds, and no disk is read."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        """clock: seconds; it does not jump."""
        self._device, self._clock = device, clock
        self._process = psutil.Process()
        self._next_at = clock()

    def sample_if_due(self, rank: int, step: int) -> MemoryUsed | None:
        """Return a sample, after the first step and then every `SAMPLE_INTERVAL_S`."""
        now = self._clock()
        if now < self._next_at:
            return None
        self._next_at = now + SAMPLE_INTERVAL_S
        found = self._process.memory_info()
        own = max(0, found.rss - getattr(found, "shared", 0))
        on_device = self._device.type != "cpu"
        most = int(torch.accelerator.max_memory_allocated(self._device)) if on_device else 0
        return MemoryUsed(rank, own, most, step=step)

"""Samples the memory and the routers of a worker, a few times a minute, for the report."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import torch
from torch import nn

from holdfast.core.expert_load import ExpertsRouted
from holdfast.events import MemoryUsed
from holdfast.layout import Coordinate
from holdfast.model.decoder import Decoder
from holdfast.model.experts import RoutedFeedForward
from holdfast.training.memory.transfers import TransferAccount

SAMPLE_INTERVAL_S = 10.0


class MemoryMeter:
    """The samples of one rank. A look costs some ten microseconds, and no disk is read."""

    def __init__(
        self,
        device: torch.device,
        clock: Callable[[], float],
        transfers: TransferAccount | None = None,
    ) -> None:
        """clock: seconds; it does not jump. transfers: what a sample tells of copies."""
        self._device, self._clock, self._transfers = device, clock, transfers
        self._process = psutil.Process()
        self._next_at = clock()

    def sample_if_due(self, rank: int, step: int, *, is_last: bool = False) -> MemoryUsed | None:
        """Return a sample, after the first step and then every `SAMPLE_INTERVAL_S`; after the last
        step too if there may be copies to tell of."""
        now = self._clock()
        if now < self._next_at and not (is_last and self._transfers is not None):
            return None
        self._next_at = now + SAMPLE_INTERVAL_S
        found = self._process.memory_info()
        own = max(0, found.rss - getattr(found, "shared", 0))
        on_device = self._device.type != "cpu"
        most = int(torch.accelerator.max_memory_allocated(self._device)) if on_device else 0
        transfers = {} if self._transfers is None else self._transfers.take()
        return MemoryUsed(rank, own, most, transfers, step=step)


class ExpertMeter:
    """The samples of one rank. Ranks along tp have the same tokens, so the first one counts."""

    def __init__(
        self, objective: nn.Module, at: Coordinate, last_step: int, clock: Callable[[], float]
    ) -> None:
        """clock: seconds; it does not jump."""
        decoder = getattr(objective, "decoder", None)
        blocks = decoder.layers.items() if isinstance(decoder, Decoder) and at.tp == 0 else ()
        self._layers = {
            str(position): block.ffn
            for position, block in blocks
            if isinstance(block.ffn, RoutedFeedForward)
        }
        self._clock, self._last_step = clock, last_step
        self._next_at = clock()

    def sample_if_due(self, rank: int, step: int, *, is_pausing: bool) -> ExpertsRouted | None:
        """Return a sample after the first step, then every `SAMPLE_INTERVAL_S`, and after the last
        step; None without experts. is_pausing: the step is the last of its generation."""
        now = self._clock()
        is_last = is_pausing or step >= self._last_step
        if not self._layers or (now < self._next_at and not is_last):
            return None
        self._next_at = now + SAMPLE_INTERVAL_S
        found = {name: layer.take_counts() for name, layer in self._layers.items()}
        counts = {name: counts for name, (counts, _) in found.items() if counts}
        dropped = sum(dropped for _, dropped in found.values())
        loads = {name: load for name, layer in self._layers.items() if (load := layer.take_load())}
        return ExpertsRouted(rank, counts, dropped, loads, step=step) if counts else None

"""Counts how long copies of a rank's state take, and how long its work waits for them.

The share hidden is 1 - waited seconds / seconds of copies. If two lanes copy at the same time,
the seconds are those of the busier one: a lane does not hide the other. On an accelerator events of
its streams tell both, and they are read when they have happened. A wait of the host counts there,
too: so a share is rather too low than too high.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class _Span:
    """From one event of a device to another one. slot: as in `TransferAccount`."""

    start: torch.Event
    stop: torch.Event
    nbytes: Mapping[str, int]
    slot: int


LOADS, STORES, WAITED = 1, 2, 3
"""Slots of the sums of seconds: two lanes of copies, and waits."""


class TransferAccount:
    """Bytes, seconds of copies and seconds waited, by kind of state. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, list[float]] = {}  # kind -> bytes, and seconds by slot
        self._spans: list[_Span] = []  # of a device, not read yet

    @contextmanager
    def timed(self, nbytes: Mapping[str, int], slot: int) -> Iterator[None]:
        """Count the seconds inside as those of a slot, for so many bytes by kind."""
        begun = time.perf_counter()
        yield
        self._add(nbytes, time.perf_counter() - begun, slot)

    def span(
        self, start: torch.Event, stop: torch.Event, nbytes: Mapping[str, int], slot: int
    ) -> None:
        """Count the time between two events of a device, once they have happened."""
        with self._lock:
            self._spans.append(_Span(start, stop, nbytes, slot))

    def take(self) -> dict[str, list[float]]:
        """Return kind -> [bytes, seconds of copies, seconds waited] since the last call."""
        with self._lock:
            spans, self._spans = self._spans, []
        for span in spans:
            if not span.stop.query():
                with self._lock:
                    self._spans.append(span)
                continue
            seconds = max(0.0, span.start.elapsed_time(span.stop) / 1e3)
            self._add(span.nbytes, seconds, span.slot)
        with self._lock:
            sums, self._sums = self._sums, {}
        return {
            kind: [nbytes, max(loads, stores), waited]
            for kind, (nbytes, loads, stores, waited) in sums.items()
        }

    def _add(self, nbytes: Mapping[str, int], seconds: float, slot: int) -> None:
        """Divide seconds among kinds by their bytes."""
        total = sum(nbytes.values())
        with self._lock:
            for kind, part in nbytes.items():
                found = self._sums.setdefault(kind, [0.0] * 4)
                share = seconds * part / total if total else seconds / len(nbytes)
                found[0] += 0 if slot == WAITED else part
                found[slot] += share

"""Counts the bytes of one rank's state by place, and holds the device to its limit.

On a CPU the place `device` is a number only. So a limit means the same there as on a device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from holdfast.config.sections.memory import DEVICE, GB, PLACES
from holdfast.errors import StateMemoryError


class MemoryLedger:
    """Bytes by place (`device`, `host`, `file`) and kind, now and at most.

    limit: bytes of the device; 0: none. movable: keys of `train.memory` by which a person may move
    state from there. Kinds are words for a person: `parameters`, `gradients`,
    `optimizer`, `staging`, `activations`. Any thread may call it.
    """

    def __init__(self, limit: int = 0, movable: Sequence[str] = ()) -> None:
        self.limit = limit
        self._moves = " and ".join(f"train.memory.{key}=host" for key in movable)
        self._lock = threading.Lock()
        self._now: dict[str, dict[str, int]] = {place: {} for place in PLACES}
        self._peak: dict[str, int] = dict.fromkeys(PLACES, 0)

    def add(self, place: str, kind: str, nbytes: int) -> None:
        """Count bytes that are used from now on; fewer if `nbytes` is negative.

        Raises StateMemoryError, and counts nothing, if the device would have more than its limit.
        """
        with self._lock:
            kinds = self._now[place]
            total = sum(kinds.values()) + nbytes
            if place == DEVICE and self.limit and nbytes > 0 and total > self.limit:
                raise self._excess({**kinds, kind: kinds.get(kind, 0) + nbytes}, total)
            kinds[kind] = kinds.get(kind, 0) + nbytes
            self._peak[place] = max(self._peak[place], total)

    @contextmanager
    def held(self, place: str, kind: str, nbytes: int) -> Iterator[None]:
        """Count bytes that are used inside. Raises as `add`."""
        self.add(place, kind, nbytes)
        try:
            yield
        finally:
            self.add(place, kind, -nbytes)

    def now(self, place: str) -> int:
        """Bytes in use."""
        return sum(self.by_kind(place).values())

    def peak(self, place: str) -> int:
        """Most bytes that were in use at once."""
        return self._peak[place]

    def by_kind(self, place: str) -> dict[str, int]:
        """Bytes in use by kind."""
        with self._lock:
            return dict(self._now[place])

    def _excess(self, kinds: dict[str, int], total: int) -> StateMemoryError:
        parts = ", ".join(f"{kind} {format_gb(n)}" for kind, n in kinds.items() if n)
        return StateMemoryError(
            f"a rank needs {format_gb(total)} GB of its device ({parts}), which is "
            f"{format_gb(total - self.limit)} GB more than the limit of {format_gb(self.limit)} GB",
            where="train.memory.device_gb",
            remedy=f"use train.memory.device_gb={_round_up(total)} or more (holdfast layout show "
            "prints an estimate)" + (f", or move state with {self._moves}" if self._moves else ""),
        )


def format_gb(nbytes: int) -> str:
    """Return a number of GB in at least four digits."""
    return f"{nbytes / GB:.4g}"


def _round_up(nbytes: int) -> str:
    """Return a number of GB that is not less."""
    unit = 10 ** max(0, len(str(nbytes)) - 4)
    return f"{-(-nbytes // unit) * unit / GB:.12g}"

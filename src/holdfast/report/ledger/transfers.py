"""Copies between a device and other places of a run's state, and which part of them was hidden."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.events import MemoryUsed
from holdfast.report.formatting import format_bytes, format_percent


@dataclass(frozen=True)
class TransferSum:
    """Copies of one kind of state, by all workers. seconds: of the copies; waited: in which a
    worker had nothing else to do."""

    nbytes: int = 0
    seconds: float = 0.0
    waited: float = 0.0

    @property
    def hidden(self) -> float:
        """The share of the copies' time in which a worker did not wait."""
        return max(0.0, 1.0 - self.waited / self.seconds) if self.seconds else 0.0


def add_transfers(known: Mapping[str, TransferSum], event: MemoryUsed) -> dict[str, TransferSum]:
    """Return the sums by kind with those of one more sample."""
    sums = dict(known)
    for kind, (nbytes, seconds, waited) in event.transfers.items():
        before = sums.get(kind, TransferSum())
        sums[kind] = TransferSum(
            before.nbytes + int(nbytes), before.seconds + seconds, before.waited + waited
        )
    return sums


def transfer_note(transfers: Mapping[str, TransferSum]) -> str:
    """Return a sentence for each kind."""
    return " ".join(
        f"{format_bytes(found.nbytes)} of {kind} were copied to other places and back: "
        f"{format_percent(found.hidden)} of {found.seconds:.3g} s hidden."
        for kind, found in transfers.items()
    )

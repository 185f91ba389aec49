"""Task of a rank of the checkpoint benchmark, and the protocol of a way of saving."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

TRAINED = {"preset": "medium", "vocabulary": 22_784, "sequence": 256, "batch": 8}
"""The real training step: 61 M parameters, 2,048 tokens."""


@dataclass(frozen=True)
class Task:
    """A state of `tensors` equal fp32 tensors, complete on every rank; or, with `train`, the state
    of a real engine."""

    world: int
    meeting: str
    folder: str
    socket: str
    secret: str
    tensors: int = 60
    rows: int = 0
    columns: int = 1024
    train: bool = False
    quick: bool = False
    model: dict[str, Any] | None = None  # another shape to train

    @property
    def shape(self) -> dict[str, Any]:
        """Of the model that is trained."""
        small = {"preset": "tiny", "vocabulary": 512, "sequence": 32, "batch": 4}
        return dict(self.model or (small if self.quick else TRAINED))


class Way(Protocol):
    """One way of saving. A save is begun and fenced on the training thread, which is blocked in
    both calls. Work between them may run in the background."""

    def begin(self, step: int) -> None:
        """Returns when training may compute the next step, which changes nothing."""
        ...

    def fence(self) -> None:
        """Returns when the state may change."""
        ...

    def finish(self) -> None:
        """Returns when the newest save is durable; also called on another thread, after `begin`."""
        ...

    def close(self) -> None: ...

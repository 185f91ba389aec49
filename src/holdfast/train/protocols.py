"""What the training loop asks of the world: three protocols, and nothing else.

A local run, a test and a fleet of agents are different implementations of the same three. The
loop itself knows no process, no file and no network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from holdfast.events import Event
from holdfast.train.engine import Microbatch
from holdfast.train.state import LocalTensor
from holdfast.train.vote import Wishes


class Membership(Protocol):
    """Who takes part. Asked once per step, just before the vote."""

    def wishes(self, step: int) -> Wishes:
        """What this rank would like to happen at the end of `step`. Must return at once."""
        ...


class Reporter(Protocol):
    """Where events go. Both calls return at once; events stay in order."""

    def emit(self, event: Event) -> None: ...

    def progress(self, step: int, phase: str) -> None:
        """This rank is alive, in `phase` of `step`."""
        ...


class Saver(Protocol):
    """How state becomes a snapshot, and a snapshot a checkpoint.

    The loop captures, reports what the step did, and only then announces the snapshot: so nobody
    knows of a state whose ledger is missing.
    """

    def capture(self, step: int, state: Sequence[LocalTensor], wait: float) -> bool:
        """Copy the state after `step`; training stands still meanwhile. False when there was no
        room within `wait` seconds. Never raises for a save that fails: training goes on."""
        ...

    def announce(self, step: int, meta: Mapping[str, Any]) -> None:
        """Let the captured state of `step` be saved, after all events emitted so far."""
        ...

    def settle(self, step: int, seconds: float) -> str | None:
        """Wait until `step` is durable. None when it is, else why it is not."""
        ...


class StepBatch(Protocol):
    """One rank's share of one step."""

    @property
    def step(self) -> int: ...

    @property
    def microbatches(self) -> Sequence[Microbatch]: ...

    @property
    def entries(self) -> list[dict[str, Any]]: ...


Feed = Iterator[StepBatch]
"""Shares of consecutive steps; `data.loader.Loader` is one."""

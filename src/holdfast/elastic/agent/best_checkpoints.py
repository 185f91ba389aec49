"""Keeps the checkpoints with the lowest validation loss: `checkpoint.keep_best`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from math import isfinite

from holdfast.checkpoint.save.retention import keep_lowest
from holdfast.elastic.event_log import Say
from holdfast.errors import HoldfastError
from holdfast.events import CheckpointCommitted, Evaluated, Record
from holdfast.wire.store.run_store import RunStore


class BestCheckpoints:
    """The marks that one agent writes into the run store. Lives in one event loop.

    A run store that is away gets them after the next validation or checkpoint.
    """

    def __init__(self, store: RunStore, keep_best: int, say: Say) -> None:
        self._store, self._keep_best, self._say = store, keep_best, say
        self._losses: dict[int, float] = {}  # that are not stored yet
        self._writing: asyncio.Task[None] | None = None

    def load(self, records: Iterable[Record]) -> None:
        """Learn the losses of earlier sessions: one may have ended before it stored them, or
        without `keep_best`. They are stored with the next one."""
        for record in sorted(records, key=lambda record: record.order):
            if isinstance(event := record.event, Evaluated) and isfinite(event.loss):
                self._losses[event.step] = event.loss

    def observe(self, record: Record) -> None:
        event = record.event
        if not self._keep_best or not isinstance(event, Evaluated | CheckpointCommitted):
            return
        if isinstance(event, Evaluated) and isfinite(event.loss):
            self._losses[event.step] = event.loss
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def finish(self) -> None:
        """Return when what was observed is stored, or could not be."""
        if self._writing is not None:
            await self._writing
        if self._keep_best and self._losses:
            await self._write()

    async def _write(self) -> None:
        losses = dict(self._losses)
        try:
            await asyncio.to_thread(keep_lowest, self._store, self._keep_best, losses)
        except HoldfastError as error:
            self._say(f"checkpoint.keep_best waits for the run store: {error}")
        else:
            self._losses = {
                step: loss for step, loss in self._losses.items() if losses.get(step) != loss
            }

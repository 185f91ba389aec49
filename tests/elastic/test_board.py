"""An agent's side of the journal."""

from __future__ import annotations

import asyncio
from pathlib import Path

from holdfast.elastic.board import Board
from holdfast.events import GenerationStarted, Record, StepDone
from holdfast.wire.journal import read
from holdfast.wire.runstore import FolderStore


def _started(step: int) -> GenerationStarted:
    return GenerationStarted({"nodes": ["a"]}, "worker_lost", None, 0, [0], step=step)


def test_a_step_that_is_told_once_more_is_neither_shown_nor_stored(tmp_path: Path) -> None:
    shown: list[Record] = []

    async def go() -> None:
        board = Board(FolderStore(tmp_path), [shown.append], print)
        for generation, start, steps in ((1, 0, range(1, 5)), (2, 4, (3, 4, 5)), (3, 3, (4, 5))):
            board.begin(generation)
            board.emit("agent", _started(start))
            for step in steps:
                board.emit("rank0", StepDone(1.0, 1, 1.0, 1e-3, 0.1, step=step))
        assert await board.flush()

    asyncio.run(go())
    told = [1, 2, 3, 4, 5, 4, 5]  # generation 3 does again what was lost with generation 2
    assert [r.event.step for r in shown if isinstance(r.event, StepDone)] == told
    stored = [r for r in read(FolderStore(tmp_path)) if isinstance(r.event, StepDone)]
    assert [(r.generation, r.event.step) for r in stored] == [
        (1, 1), (1, 2), (1, 3), (1, 4), (2, 5), (3, 4), (3, 5)
    ]  # fmt: skip

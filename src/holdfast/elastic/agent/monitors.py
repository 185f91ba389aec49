"""What an agent looks at again and again: whether its workers get on, and what it has refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from holdfast.elastic.event_log import Board, Say
from holdfast.elastic.node.worker_group import Generation
from holdfast.events import RequestsRefused
from holdfast.wire.http.refusals import Refusals, sentence


async def watch_progress(
    beat: float, current: Callable[[], Generation | None], flush: Callable[[], Awaitable[object]]
) -> None:
    """Without end; it also stores what the last flush could not."""
    clock = asyncio.get_running_loop().time
    flushing: asyncio.Future[object] | None = None
    try:
        while True:
            await asyncio.sleep(beat)
            generation = current()
            if generation is not None:
                generation.watch_progress(clock())
            if flushing is None or flushing.done():
                if flushing is not None:
                    flushing.result()
                # Not waited for: a run store that is out of reach keeps nobody from looking.
                flushing = asyncio.ensure_future(flush())
    finally:
        if flushing is not None:
            flushing.cancel()


def counting_refusals(board: Board, opened: Callable[[], bool], say: Say) -> Refusals:
    """What an agent's listeners refuse: told in the journal, once a generation is open, and in a
    line. To be called in the event loop of the board."""
    loop = asyncio.get_running_loop()

    def tell(event: RequestsRefused) -> None:
        if (line := sentence(event)) is not None:
            say(line)
        if opened():
            board.emit("agent", event)

    def told(event: RequestsRefused) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, event)

    return Refusals(told)

"""Periodic checks of an agent: its workers' progress, and the requests that it refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from holdfast.elastic.event_log import EventLog, Say
from holdfast.elastic.node.worker_group import WorkerGroup
from holdfast.elastic.notices.prediction import PredictionWatch
from holdfast.events import RequestsRefused
from holdfast.wire.http.refusals import Refusals, describe_refusals


async def check_progress_forever(
    interval_s: float,
    worker_group: Callable[[], WorkerGroup | None],
    flush: Callable[[], Awaitable[object]],
    check_helpers: Callable[[float], None] = lambda now: None,
) -> None:
    """Check the workers' progress and the helpers every `interval_s` seconds, and store pending
    records; never ends."""
    clock = asyncio.get_running_loop().time
    flushing: asyncio.Future[object] | None = None
    try:
        while True:
            await asyncio.sleep(interval_s)
            check_helpers(clock())
            generation = worker_group()
            if generation is not None:
                generation.check_progress(clock())
            if flushing is None or flushing.done():
                if flushing is not None:
                    flushing.result()
                # Do not wait for it: an unreachable run store must not stop the checks.
                flushing = asyncio.ensure_future(flush())
    finally:
        if flushing is not None:
            flushing.cancel()


async def check_prediction_forever(
    watch: PredictionWatch, check: Callable[[PredictionWatch], None]
) -> None:
    """Ask the predictor again and again; never ends."""
    while True:
        await asyncio.sleep(watch.check_interval_s)
        check(watch)


def make_refusal_counter(
    event_log: EventLog, is_generation_open: Callable[[], bool], say: Say
) -> Refusals:
    """Return the counter of requests that the agent's listeners refuse.

    It reports to the journal once a generation is open, and to the user. Call it in the event loop
    of the event log."""
    loop = asyncio.get_running_loop()

    def tell(event: RequestsRefused) -> None:
        if (line := describe_refusals(event)) is not None:
            say(line)
        if is_generation_open():
            event_log.emit("agent", event)

    def told(event: RequestsRefused) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, event)

    return Refusals(told)

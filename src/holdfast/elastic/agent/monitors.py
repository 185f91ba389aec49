"""Periodic checks of an agent: its workers' progress, and the requests that it refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from holdfast.elastic.event_log import EventLog, Say
from holdfast.elastic.node.node_runner import NodeRunner
from holdfast.elastic.node.worker_group import WorkerGroup
from holdfast.elastic.notices.prediction import PredictionWatch
from holdfast.elastic.protocol.generation_record import read_record
from holdfast.elastic.run_context import RunContext
from holdfast.errors import HoldfastError
from holdfast.events import MajorityLacked, RequestsRefused, SparesChanged
from holdfast.policy.membership.election import LackedMajority
from holdfast.wire.http.refusals import Refusals, describe_refusals
from holdfast.wire.term import newest_generation


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


async def report_spare_forever(
    interval_s: float, context: RunContext, node_runner: NodeRunner, say: Say
) -> None:
    """Tell the user once whenever this node begins to wait as a spare; never ends."""
    has_said = False
    while True:
        await asyncio.sleep(interval_s)
        if not node_runner.is_spare or has_said:
            has_said = has_said and node_runner.is_spare
            continue
        with suppress(HoldfastError):  # a run store that is away is asked again
            newest = await asyncio.to_thread(newest_generation, context.store)
            topology = (await read_record(context.store, newest)).topology
            wanted = context.config.layout.workers
            if topology is not None and topology.world_size >= wanted:
                has_said = True
                say(
                    f"{context.node} waits as a spare: all {wanted} workers of the run have a "
                    "place; it takes over when one is lost"
                )


async def report_spares_forever(
    interval_s: float,
    spares: Callable[[], tuple[str, ...] | None],
    emit: Callable[[SparesChanged], None],
) -> None:
    """Emit the spares when they have changed and stay the same for an interval; never ends.

    spares: returns the names; None while another agent coordinates."""
    before, emitted = spares(), None
    while True:
        await asyncio.sleep(interval_s)
        found = spares()
        if found is not None and found == before and found != emitted:
            emit(SparesChanged(nodes=list(found)))
        emitted = found if found in (None, before) else emitted
        before = found


async def report_minority_forever(
    interval_s: float,
    node: str,
    lacked_majority: Callable[[], LackedMajority | None],
    emit: Callable[[MajorityLacked], None],
) -> None:
    """Emit when this node begins to lack a majority, and when that is over; never ends."""
    is_lacking = False
    while True:
        await asyncio.sleep(interval_s)
        lacked = lacked_majority()
        if (lacked is not None) is is_lacking:
            continue
        is_lacking = lacked is not None
        it = lacked or LackedMajority((), (), 0.0)
        emit(MajorityLacked(node, [*it.reached], [*it.members], it.wait_s))


async def check_prediction_forever(
    watch: PredictionWatch, check: Callable[[PredictionWatch], None], say: Say
) -> None:
    """Ask the predictor and this node's signals again and again; never ends."""
    while True:
        if missing := await asyncio.to_thread(watch.read_signals):
            say(f"cluster.signals: this node cannot read {' or '.join(missing)}")
        check(watch)
        await asyncio.sleep(watch.check_interval_s)


async def check_save_forever(interval_s: float, check: Callable[[], None]) -> None:
    """Check every `interval_s` seconds whether the save of an asked stop waits; never ends."""
    while True:
        await asyncio.sleep(interval_s)
        check()


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

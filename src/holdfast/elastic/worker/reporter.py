"""A worker's reporter: one thread, events in order.

Training does not wait for the agent (but see `wait_until_sent`). It queues events, progress and
callbacks here. The thread posts them in batches and brings back the agent's requests. A callback
runs only after the agent has acknowledged all earlier events as durable. So a snapshot is announced
after the ledger of its steps, and no checkpoint is known whose ledger may be missing. While the
callback waits (a full disk), later events still go to the agent, so that the run stays visible.

A caller that knows of a coming callback announces it (`expect_callback`). Then the events are made
durable as they are posted, and the callback needs no request of its own. Events that may wait go
along with the next request (`emit_lazily`).
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable

from holdfast.core.device_progress import GroupProgress
from holdfast.elastic.protocol.worker_messages import (
    REPORT_PATH,
    STEP_PHASES,
    WorkerOutcome,
    WorkerReply,
    WorkerReport,
)
from holdfast.elastic.worker.event_queue import EventQueue, UnsentEvents
from holdfast.errors import FencedError, HoldfastError
from holdfast.events import Event
from holdfast.wire.http.client import Client, RequestError

_LEDGER_WAIT_S = 1.0  # seconds that training waits for an agent that does not take its ledger
_CALLBACK_WAIT_S = 1.0  # that a callable which is under way may delay the next generation


class ProgressMeter:
    """Records how far training is, and how long its steps take. Training's thread writes it; the
    reporter's thread reads whole values."""

    def __init__(self) -> None:
        self.progress: tuple[int, str, int] = (0, "start", 0)
        """Step, phase, number of calls within the step."""
        self.compute_time = (0.0, 0)
        """Seconds of computing, microbatches."""
        self.load = (0.0, 0.0)
        """Of `compute_time`, seconds in which it was ready to run and had no processor; elements of
        the microbatches."""
        self.step_time = (0.0, 0)
        """Seconds from a step's arithmetic to the end of its vote, steps."""
        self.microbatch_count: Callable[[], int] | None = None
        """Returns this rank's number of microbatches in the open step."""
        self.element_count: Callable[[], int] = int
        """Returns the number of elements of these microbatches."""
        self.device_progress: Callable[[], tuple[GroupProgress, ...]] = tuple
        """Returns how far the device is with exchanges."""
        self.received_bytes: Callable[[], int] = int
        """Returns the bytes that have come from other ranks."""
        self._computing_since: float | None = None  # since when
        self._waited_before_s = 0.0  # for a processor, when it began to compute
        self._step_began_at = 0.0  # with the step that is under way

    def record(self, step: int, phase: str) -> None:
        """Record that training is inside `phase` of `step`.

        The calls within a step are counted. If all ranks stall, the rank that got least far blocks
        the rest.
        """
        now = time.monotonic()
        if phase == "compute":
            self._computing_since, self._waited_before_s = now, run_delay_s()
        elif (
            phase == "reduce"
            and self._computing_since is not None
            and self.microbatch_count is not None
        ):
            seconds, microbatches = self.compute_time
            self.compute_time = (
                seconds + now - self._computing_since,
                microbatches + self.microbatch_count(),
            )
            self._computing_since = None
            waited, elements = self.load
            self.load = (
                waited + run_delay_s() - self._waited_before_s,
                elements + self.element_count(),
            )
        before, last, marks = self.progress
        if phase in STEP_PHASES and last not in STEP_PHASES:
            self._step_began_at = now
        elif phase not in STEP_PHASES and last in STEP_PHASES:
            seconds, steps = self.step_time
            self.step_time = (seconds + now - self._step_began_at, steps + 1)
        self.progress = (step, phase, marks + 1 if step == before else 1)


def run_delay_s() -> float:
    """Return the seconds for which this thread was ready to run and waited for a processor; 0 if
    the system does not say."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class ReportWriter:
    """Writes one rank's reports. Belongs to the reporter's thread."""

    def __init__(
        self, rank: int, stream_id: str, meter: ProgressMeter, is_asleep: Callable[[], bool]
    ) -> None:
        self._rank, self._stream_id, self._meter = rank, stream_id, meter
        self._is_asleep = is_asleep
        self._reported_progress = meter.progress  # with the last report
        self._received, self._arrivals = 0, 0

    def write(
        self,
        batch: list[tuple[int, Event]],
        first_number: int,
        *,
        sync: bool,
        has_callbacks: bool,
        outcome: WorkerOutcome | None,
    ) -> WorkerReport:
        """Write the report of a batch whose first event has this number."""
        meter = self._meter
        before, self._reported_progress = self._reported_progress, meter.progress
        step, phase, marks = self._reported_progress
        is_still = before == self._reported_progress
        is_asleep = is_still and self._is_asleep()
        if is_still and (received := meter.received_bytes()) != self._received:
            self._received, self._arrivals = received, self._arrivals + 1
        return WorkerReport(
            self._rank,
            step,
            phase,
            marks,
            # The agent drops what it has seen: a batch whose answer was lost is sent again.
            first_number,
            tuple(event for _, event in batch),
            self._stream_id,
            sync,
            has_callbacks,
            is_asleep,
            meter.compute_time,
            meter.load,
            meter.step_time,
            round(time.thread_time(), 4),  # the process computes at the same time
            outcome,
            meter.device_progress() if is_still else (),
            self._arrivals,
        )


class CallbackQueue:
    """Callbacks, each of which waits until the events before it are durable. Its owner's lock
    guards it."""

    def __init__(self) -> None:
        # events before it, the call
        self._callbacks: deque[tuple[int, Callable[[], None]]] = deque()
        self._expected = 0  # calls that will come, and those that are there
        self.is_announced = False
        """Whether the agent knows that one may be under way."""

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    @property
    def is_expecting(self) -> bool:
        """Return True if a callback is announced, and has not run."""
        return self._expected > 0

    def expect(self) -> None:
        self._expected += 1

    def append(self, number: int, call: Callable[[], None]) -> None:
        """Add a callback that waits for all events below a number."""
        self._callbacks.append((number, call))

    def next_within(self, number: int | None) -> Callable[[], None] | None:
        """Return the next callback, if it waits for events below `number` only (None: any)."""
        due = bool(self._callbacks) and (number is None or self._callbacks[0][0] <= number)
        return self._callbacks[0][1] if due else None

    def drop_next(self) -> None:
        """Remove the next callback, which has run."""
        self._callbacks.popleft()
        self._expected = max(0, self._expected - 1)


class AgentReporter:
    """Posts this rank's events to the agent. Every method but `flush`, `close` and
    `wait_until_sent` returns at once.

    `on_error` is called if a queued callback raises; the thread continues.
    """

    def __init__(
        self,
        client: Client,
        rank: int,
        *,
        heartbeat_s: float = 0.2,
        on_error: Callable[[BaseException], None] | None = None,
        unsent: UnsentEvents | None = None,
        is_asleep: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare the reporter; `start` starts its thread.

        Args:
            heartbeat_s: seconds between reports without news.
            unsent: the events that this process's reporter left in an older generation.
            is_asleep: returns True if training sleeps where ranks wait for each other. It is called
                while training makes no progress.
        """
        self._client = client
        self._heartbeat_s = heartbeat_s
        self._on_error = on_error
        self._events = EventQueue(unsent or UnsentEvents(secrets.token_hex(8)))
        self._batch_first_number = self._events.next_number  # of the batch that is being sent
        self._callbacks = CallbackQueue()
        self._durable_below = -1  # every event with a lower number is
        self._changed = threading.Condition()
        self.progress_meter = ProgressMeter()
        self._writer = ReportWriter(rank, self._events.stream_id, self.progress_meter, is_asleep)
        self._outcome: WorkerOutcome | None = None
        self._is_busy = False
        self._may_wait = True
        self._is_closing = False
        self._requests = WorkerReply()
        self._fenced = threading.Event()
        self._thread = threading.Thread(
            target=self._post_until_closed, name="reporter", daemon=True
        )

    # --- what training calls --------------------------------------------------------------
    def start(self) -> None:
        self._thread.start()

    def emit(self, event: Event) -> None:
        """Queue an event for the journal."""
        with self._changed:
            self._events.append(event)
            self._send_now()

    def emit_lazily(self, event: Event) -> None:
        """Queue an event that may wait: it is sent with the next one, or the next heartbeat.

        At most one event waits so; no callback waits for it.
        """
        with self._changed:
            if self._events.has_lazy:
                self._send_now()
            self._events.append(event)

    def _send_now(self) -> None:
        self._events.mark_urgent()
        self._changed.notify_all()

    def expect_callback(self) -> None:
        """Announce one more call of `call_when_durable`: events emitted until it has run are made
        durable at once."""
        with self._changed:
            self._callbacks.expect()

    def progress(self, step: int, phase: str) -> None:
        """Report that this rank is alive, inside `phase` of `step`. Costs one assignment: it is
        sent with the next heartbeat, and a newer one replaces it."""
        self.progress_meter.record(step, phase)

    def call_when_durable(self, call: Callable[[], None]) -> None:
        """Run `call` on the reporter's thread after all events emitted so far are durable."""
        with self._changed:
            self._callbacks.append(self._events.urgent_below, call)
            self._changed.notify_all()

    def report_outcome(self, kind: str, step: int, unsaved: str | None = None) -> None:
        """Report how this worker is about to end: "finished" or "left", after `step`.

        unsaved: why the state after that step is not durable; None if it is.
        """
        with self._changed:
            self._outcome = WorkerOutcome(kind, step, unsaved)
            self._changed.notify_all()

    @property
    def requests(self) -> WorkerReply:
        """The agent's newest answer, which has its requests."""
        return self._requests

    @property
    def is_fenced(self) -> bool:
        """Return True if a newer generation has been opened: stop writing, leave."""
        return self._fenced.is_set()

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until all queued items are acknowledged. Return False if `timeout_s` seconds were
        not enough, or if this worker is fenced."""
        end = time.monotonic() + timeout_s
        with self._changed:
            self._send_now()
            while self._events or self._callbacks or self._outcome or self._is_busy:
                left = end - time.monotonic()
                if left <= 0 or self.is_fenced or self._is_closing:
                    return False
                self._changed.wait(left)
        return not self.is_fenced

    def close(self, timeout_s: float = 10.0) -> bool:
        """Flush, then end the thread. Returns what `flush` returns."""
        done = self.flush(timeout_s)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return done

    def close_and_take_unsent(self) -> UnsentEvents:
        """Close at once; return the events to send in the next generation."""
        self.close(0.0)
        self._client.abort()  # an answer that is still waited for is not needed: numbers tell
        self._thread.join(_CALLBACK_WAIT_S)
        with self._changed:
            return self._events.unsent()

    def wait_until_sent(self, step: int) -> None:
        """Wait until the agent has the events of steps up to `step`.

        If a process is killed, other processes can replace its unsent events for the last few steps
        only. After one wait in vain, do not wait again until the agent has caught up.
        """
        if self._events.is_sent_up_to(step):
            self._may_wait = True
        elif self._may_wait:
            with self._changed:
                self._send_now()
                self._may_wait = self._changed.wait_for(
                    lambda: self._events.is_sent_up_to(step) or self.is_fenced, _LEDGER_WAIT_S
                )

    @property
    def has_pending_callbacks(self) -> bool:
        """Return True if a callback waits for its events to be durable."""
        return bool(self._callbacks)

    # --- the thread -----------------------------------------------------------------------
    @property
    def _has_urgent(self) -> bool:
        return bool(self._events.has_urgent or self._callbacks or self._outcome)

    def _post_until_closed(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                if not (self._has_urgent or self._is_closing):
                    self._changed.wait(self._heartbeat_s)
                if self._is_closing or self.is_fenced:
                    return
                self._is_busy = True
                # It may run without a request, if the agent expects one.
                announced = self._callbacks.is_announced
                at_once = self._callbacks.next_within(self._durable_below) if announced else None
            if at_once is not None:
                self._run_callback(at_once)
                continue
            with self._changed:
                batch = self._events.next_batch()
                self._batch_first_number = batch[0][0] if batch else self._events.next_number
                call = self._callbacks.next_within(self._events.number_behind(batch))
                outcome = self._outcome
            # Post one batch and drop it; once it is durable, run the callback that waits for it.
            some_new = self._batch_first_number + len(batch) > self._durable_below
            sync = some_new and (call is not None or self._callbacks.is_expecting)
            taken, stored = self._post(batch, sync=sync, outcome=outcome)
            if sync and stored:
                self._durable_below = self._batch_first_number + len(batch)
            if call is not None and stored:
                self._run_callback(call)
            with self._changed:
                if taken:
                    self._events.drop(batch)
                if taken and outcome is not None and self._outcome == outcome:
                    self._outcome = None
                waiting = not taken or (call is not None and not stored)
                if waiting and not (self._is_closing or self.is_fenced):
                    # The agent is busy, or its disk is full: the queue waits for the next beat.
                    self._changed.wait(self._heartbeat_s)

    def _run_callback(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._report_error(error)
        with self._changed:
            self._callbacks.drop_next()

    def _report_error(self, error: BaseException) -> None:
        if self._on_error is not None:
            self._on_error(error)

    def _post(
        self, batch: list[tuple[int, Event]], sync: bool, outcome: WorkerOutcome | None
    ) -> tuple[bool, bool]:
        """Post a batch; return (the agent has taken it, it is stored). With `sync`, stored means
        durable."""
        has_callbacks = self._callbacks.is_expecting or bool(self._callbacks)
        report = self._writer.write(
            batch, self._batch_first_number, sync=sync, has_callbacks=has_callbacks, outcome=outcome
        )
        try:
            answer = self._client.post(REPORT_PATH, report.to_json(), 10.0)
        except FencedError:
            self._fenced.set()
            with self._changed:
                self._changed.notify_all()
            return False, False
        except (RequestError, TypeError, ValueError) as error:
            # An event that cannot be sent or read is our own bug. To find it, its batch is sent one
            # by one. It is dropped, so that it does not hold up the rest.
            if len(batch) > 1:
                self._events.send_singly(batch)
                return False, False
            self._report_error(error)
            return True, False
        except HoldfastError:
            return False, False
        self._requests = WorkerReply.from_json(answer)
        # a slow disk: the events of an older report have become durable meanwhile
        self._durable_below = max(self._durable_below, self._requests.durable_below)
        self._callbacks.is_announced = has_callbacks
        return True, self._requests.is_stored

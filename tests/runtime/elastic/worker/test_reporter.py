"""A worker's voice, through a network that loses answers and an agent that is slow to store."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, BinaryIO

from holdfast.elastic.node.worker_status import WorkerTable
from holdfast.elastic.protocol.worker_messages import WorkerReport
from holdfast.elastic.worker.reporter import AgentReporter, UnsentEvents
from holdfast.events import BatchFed, Event, StepDone
from holdfast.wire.http.client import Client, RequestError
from tests.support.control_server import SECRET, Control, controlling
from tests.support.ranks import wait_until


class Desk:
    """The agent's end: takes reports as the agent does, and remembers them."""

    def __init__(self) -> None:
        self.members = WorkerTable(1, 1)
        self.members.expect_worker(0, 0.0)
        self.events: list[Event] = []
        self.bodies: list[dict[str, Any]] = []
        self.stop = False
        self.stored, self.durable = True, 0

    async def report(self, generation: int, body: dict[str, Any]) -> dict[str, Any]:
        self.bodies.append(body)
        self.events += self.members.process_report(WorkerReport.from_json(body), 0.0)
        stored = self.stored or not body["sync"]
        answer = {"stop": self.stop, "generation": generation, "stored": stored}
        return {**answer, "durable": self.durable}


def _step(step: int) -> StepDone:
    return StepDone(1.0, 1, 1.0, 0.1, 0.1, step=step)


@contextmanager
def reporting(address: str, heartbeat: float = 0.01) -> Iterator[AgentReporter]:
    errors: list[BaseException] = []
    client = Client(address, SECRET, 1, connect_retry_s=0.2)
    reporter = AgentReporter(client, 0, heartbeat_s=heartbeat, on_error=errors.append)
    reporter.errors = errors  # type: ignore[attr-defined]
    reporter.start()
    try:
        yield reporter
    finally:
        reporter.close(5)


@contextmanager
def speaking(heartbeat: float = 0.01, **more: Any) -> Iterator[tuple[AgentReporter, Desk, Control]]:
    """A reporter, and the agent that it speaks to."""
    desk = Desk()
    with (
        controlling(desk.report, **more) as control,
        reporting(control.address, heartbeat) as reporter,
    ):
        yield reporter, desk, control


def _message(stream: BinaryIO) -> bytes:
    """One HTTP message: head, and the body that its length announces."""
    head, length = b"", 0
    while not head.endswith(b"\r\n\r\n"):
        line = stream.readline()
        if not line:
            return b""
        head += line
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    return head + stream.read(length)


@contextmanager
def losing_answers(address: str, every: int) -> Iterator[str]:
    """A TCP relay that delivers each request, and cuts every `every`-th answer."""
    host, port = address.split(":")
    server = socket.create_server(("127.0.0.1", 0))
    count = [0]

    def relay(near: socket.socket) -> None:
        far = socket.create_connection((host, int(port)))
        with (
            near,
            far,
            near.makefile("rb") as requests,
            far.makefile("rb") as answers,
            suppress(OSError),
        ):
            while request := _message(requests):
                far.sendall(request)
                answer = _message(answers)
                count[0] += 1
                if count[0] % every == 0:
                    near.shutdown(socket.SHUT_RDWR)
                    return
                near.sendall(answer)

    def accept() -> None:
        with suppress(OSError):
            while True:
                near, _ = server.accept()
                threading.Thread(target=relay, args=(near,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.getsockname()[1]}"
    finally:
        server.close()


def test_events_arrive_once_and_in_order_though_answers_are_lost() -> None:
    desk = Desk()
    with (
        controlling(desk.report) as control,
        losing_answers(control.address, 3) as address,
        reporting(address) as reporter,
    ):
        for step in range(1, 301):
            reporter.emit(_step(step))
            if step % 50 == 0:
                assert reporter.flush(20)
    assert [e.step for e in desk.events] == list(range(1, 301))
    assert sum(len(body["events"]) for body in desk.bodies) > 300  # some came twice


def test_a_callable_runs_after_its_events_are_durable() -> None:
    seen: list[list[int]] = []
    with speaking() as (reporter, desk, _):
        desk.stored = False
        reporter.emit(_step(1))
        reporter.call_when_durable(lambda: seen.append([e.step for e in desk.events]))
        reporter.emit(_step(2))
        wait_until(lambda: sum(b["sync"] for b in desk.bodies) >= 3, what="three attempts")
        assert seen == []  # the disk is full: the snapshot is not announced
        assert [e.step for e in desk.events] == [1, 2]  # events go on
        desk.stored = True
        assert reporter.flush(10)
        assert seen == [[1, 2]]
        assert [e.step for e in desk.events] == [1, 2]


def test_a_callable_runs_once_a_slow_disk_has_its_events() -> None:
    """Each new report is answered before the disk has its own events."""
    ran: list[int] = []
    with speaking() as (reporter, desk, _):
        desk.stored = False
        for step in (0, 1):
            reporter.emit(_step(step))
            reporter.call_when_durable(lambda step=step: ran.append(step))  # type: ignore[misc]
        wait_until(lambda: sum(b["sync"] for b in desk.bodies) >= 3, what="three attempts")
        assert ran == []
        desk.durable = 1
        wait_until(lambda: ran == [0], what="the first to run")
        desk.durable = 2
        wait_until(lambda: ran == [0, 1], what="the second to run")


def test_a_full_disk_holds_up_the_callable_and_no_event() -> None:
    """The run goes on and is seen to; what must wait for its ledger waits, in order."""
    ran: list[int] = []
    with speaking() as (reporter, desk, _):
        desk.stored = False
        for step in range(10):
            reporter.emit(_step(step))
            reporter.call_when_durable(lambda step=step: ran.append(step))  # type: ignore[misc]
        wait_until(lambda: len(desk.events) == 10, what="all events")
        assert ran == []
        assert not reporter.flush(0.1)
        desk.stored = True
        assert reporter.flush(10)
    assert ran == list(range(10))
    assert [event.step for event in desk.events] == list(range(10))


def test_a_callable_that_was_foretold_needs_no_request_of_its_own() -> None:
    ran = threading.Event()
    with speaking(heartbeat=90) as (reporter, desk, _):
        reporter.expect_callback()
        reporter.emit(_step(1))
        wait_until(lambda: reporter._durable_below == 1, what="the step's events")
        reporter.call_when_durable(ran.set)
        assert ran.wait(120)
        assert [body["sync"] for body in desk.bodies] == [True]
        assert [body["calls"] for body in desk.bodies] == [True]  # it is not taken for silent
        reporter.emit(_step(2))
        wait_until(lambda: len(desk.events) == 2, what="the next step's events")
        assert (
            desk.bodies[-1]["sync"] is desk.bodies[-1]["calls"] is False
        )  # nothing else will come


def test_a_foretold_callable_waits_for_what_is_not_durable_yet() -> None:
    ran = threading.Event()
    with speaking() as (reporter, desk, _):
        desk.stored = False
        reporter.expect_callback()
        reporter.emit(_step(1))
        reporter.call_when_durable(ran.set)
        wait_until(lambda: sum(b["sync"] for b in desk.bodies) >= 3, what="three attempts")
        assert not ran.is_set()
        desk.stored = True
        assert ran.wait(120)


def test_nobody_is_silent_who_was_not_expected_to_do_anything_else() -> None:
    """A rank that feeds nothing has no events of a step: the agent hears of the callable first."""
    ran = list[int]()
    with speaking(heartbeat=90) as (reporter, desk, _):
        for number in (1, 2):
            reporter.call_when_durable(lambda: ran.append(len(desk.bodies)))
            wait_until(lambda number=number: len(ran) == number, what="the callable")  # type: ignore[misc]
            reporter.emit(_step(number))
            wait_until(lambda number=number: len(desk.events) == number, what="an event")  # type: ignore[misc]
    assert ran == [1, 3]
    assert [body["calls"] for body in desk.bodies] == [True, False, True, False]


def test_what_nobody_waits_for_goes_along_with_what_comes_next() -> None:
    ran = threading.Event()
    with speaking(heartbeat=90) as (reporter, desk, _):
        reporter.emit_lazily(_step(1))
        reporter.call_when_durable(ran.set)  # does not wait for it, but takes it along
        assert ran.wait(120)
        wait_until(lambda: len(desk.events) == 1, what="what was mentioned")
        reporter.expect_callback()
        reporter.emit(_step(2))
        wait_until(lambda: len(desk.events) == 2, what="an event")
        reporter.emit_lazily(_step(3))
        ran.clear()
        reporter.call_when_durable(ran.set)
        assert ran.wait(120)
        assert len(desk.bodies) == 2
        reporter.emit_lazily(_step(4))  # one may wait
        wait_until(lambda: len(desk.events) == 4, what="both that were mentioned")
        assert len(desk.bodies) == 3
        reporter.emit_lazily(_step(5))
        assert reporter.flush(60)
    assert [event.step for event in desk.events] == [1, 2, 3, 4, 5]


def test_training_that_waits_for_its_ledger_sends_what_was_mentioned() -> None:
    with speaking(heartbeat=90) as (reporter, desk, _):
        reporter.emit_lazily(_step(1))
        reporter.wait_until_sent(1)
        assert reporter._may_wait
    assert [event.step for event in desk.events] == [1]


def test_a_callable_that_fails_holds_nobody_up() -> None:
    with speaking() as (reporter, desk, _):
        reporter.call_when_durable(lambda: 1 // 0)
        reporter.emit(_step(1))
        assert reporter.flush(10)
        errors = [type(e) for e in reporter.errors]  # type: ignore[attr-defined]
    assert [e.step for e in desk.events] == [1]
    assert errors == [ZeroDivisionError]


def test_events_that_cannot_travel_or_be_read_take_no_others_with_them() -> None:
    class Unheard(Event, kind="unheard"):
        """A kind that the agent's own events do not have."""

    object.__setattr__(unheard := Unheard(step=2), "kind", "unheard_of")
    with speaking() as (reporter, desk, _):
        desk.stored = False
        # keeps what follows in the queue, to make one batch of it
        reporter.call_when_durable(lambda: None)
        reporter.emit(_step(1))
        reporter.emit(unheard)
        reporter.emit(_step(3))
        reporter.emit(StepDone(1.0, 1, 1.0, 0.1, 0.1, phases={"x": object()}))  # type: ignore[dict-item]
        reporter.emit(_step(5))
        desk.stored = True
        assert reporter.flush(10)
        errors = [type(e) for e in reporter.errors]  # type: ignore[attr-defined]
    assert [e.step for e in desk.events] == [1, 3, 5]
    assert errors == [RequestError, TypeError]


def test_a_backlog_that_is_too_long_for_one_request_arrives() -> None:
    with speaking(max_body=2000) as (reporter, desk, _):
        with reporter._changed:  # nothing is sent before all of it is there
            for step in range(40):
                reporter.emit(_step(step))
        assert reporter.flush(10)
    assert [event.step for event in desk.events] == list(range(40))
    assert reporter.errors == []  # type: ignore[attr-defined]


def test_wishes_come_back_with_any_answer() -> None:
    with speaking() as (reporter, desk, _):
        assert not reporter.requests.should_stop
        desk.stop = True
        wait_until(lambda: reporter.requests.should_stop, what="the wish")
        assert reporter.requests.newest_generation == 1


def test_progress_is_the_newest_and_counted() -> None:
    with speaking() as (reporter, desk, _):
        for _ in range(1000):
            reporter.progress(1, "compute")
        reporter.progress(2, "data")
        reporter.progress(2, "compute")
        wait_until(lambda: desk.bodies and desk.bodies[-1]["marks"] == 2, what="the progress")
    last = desk.bodies[-1]
    assert (last["step"], last["phase"], last["marks"]) == (2, "compute", 2)


def test_an_older_generation_learns_that_it_is_fenced() -> None:
    with speaking() as (reporter, desk, control):
        reporter.emit(_step(1))
        assert reporter.flush(10)
        control.begin(2)
        reporter.emit(_step(2))
        wait_until(lambda: reporter.is_fenced, what="the fence")
        assert not reporter.flush(10)
    assert [e.step for e in desk.events] == [1]


def test_what_was_not_told_is_told_once_in_the_next_generation() -> None:
    """The first batch is taken, but its answer does not come before the generation is over: the
    numbers say so. What concerns steps that are done again is left out."""
    desk, answering = Desk(), threading.Event()

    async def report(generation: int, body: dict[str, Any]) -> dict[str, Any]:
        answer = await desk.report(generation, body)
        await asyncio.to_thread(answering.wait, 60)
        return answer

    with controlling(report) as control:
        with reporting(control.address) as reporter:
            reporter.emit(_step(1))
            wait_until(lambda: desk.events, what="the first batch")
            reporter.emit(_step(2))
            untold = reporter.close_and_take_unsent()
        assert [(number, event.step) for number, event in untold.events] == [(0, 1), (1, 2)]
        answering.set()
        control.begin(2)
        more = replace(untold, next_number=4, events=(*untold.events, (2, _step(3)), (3, _step(2))))
        second = AgentReporter(
            Client(control.address, SECRET, 2), 0, heartbeat_s=0.01, unsent=more.up_to_step(2)
        )
        second.start()
        second.emit(_step(4))
        assert second.close(60)
    assert [event.step for event in desk.events] == [1, 2, 2, 4]


def test_of_what_was_not_told_a_part_is_left_out() -> None:
    """By the step that the next generation begins from; of one that had no part in a generation,
    what it fed before."""
    fed = [BatchFed(0, [], step=step) for step in (1, 2)]
    events: list[Event] = [fed[0], _step(1), fed[1], _step(2)]
    untold = UnsentEvents("voice", 7, tuple(enumerate(events, 3)))
    assert untold.up_to_step(1) == replace(untold, events=((3, fed[0]), (4, _step(1))))
    assert untold.without_kind(BatchFed) == replace(untold, events=((4, _step(1)), (6, _step(2))))


def test_training_waits_for_a_ledger_that_lies_behind_but_not_again_and_again() -> None:
    answering = threading.Event()

    async def report(generation: int, body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.to_thread(answering.wait, 60)
        return {"stop": False, "generation": generation, "stored": True}

    with controlling(report) as control, reporting(control.address) as reporter:
        reporter.emit(_step(5))
        reporter.wait_until_sent(4)  # nothing is owed of these steps
        reporter.wait_until_sent(5)
        assert not reporter._may_wait  # it was waited for in vain, and is not any more
        answering.set()
        wait_until(lambda: reporter._events.is_sent_up_to(5), what="the ledger")
        reporter.wait_until_sent(5)
        assert reporter._may_wait


def test_the_outcome_is_told_before_flush_returns() -> None:
    with speaking() as (reporter, desk, _):
        reporter.report_outcome("finished", 7)
        assert reporter.flush(10)
    (member,) = desk.members
    assert member.outcome == ("finished", 7)


def test_a_step_is_timed_without_what_lies_between_two() -> None:
    with speaking() as (reporter, desk, _):
        begun = time.monotonic()
        for phase in ("compute", "reduce", "vote"):
            reporter.progress(1, phase)
        reporter.progress(1, "data")
        inside = time.monotonic() - begun
        reporter.progress(2, "compute")
        # Waits between the steps, for longer than the step took.
        reporter.progress(2, "evaluate")
        wait_until(lambda: time.monotonic() - begun > 20 * inside, what="a wait between two steps")
        reporter.progress(3, "compute")
        wait_until(lambda: desk.members[0].step == 3, what="the third step")
        seconds, steps = desk.members[0].step_time
    assert steps == 2
    assert 0 <= seconds < 20 * inside

"""A process as its agent knows it: what it is told, what it says, and its end."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.elastic.node.worker_process import CommandServer, WorkerProcess, is_running
from holdfast.elastic.protocol.worker_commands import Begin, CommandPoll, CommandReply, Halt
from holdfast.elastic.protocol.worker_spec import WorkerSpec
from holdfast.policy.recovery.survivors import HeldState


class Log:
    """A process's log that is not written."""

    path = Path("before")

    def send_to(self, log: Path) -> None:
        self.path = log

    def last_lines(self, count: int) -> str:
        return ""


def _begin(rank: int, generation: int) -> Begin:
    spec = WorkerSpec({}, None, generation, rank, 1, "h:1", "", "", "", None, 0, "cpu", "log")
    return Begin(spec)


def _process(pid: int = 7) -> WorkerProcess:
    return WorkerProcess(Log(), pid=pid)


def test_kill_reaches_the_group_and_never_a_stranger() -> None:
    script = "import subprocess, sys; print(1, flush=True); subprocess.run(['sleep', '1000'])"
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True
    )
    assert child.stdout is not None
    child.stdout.readline()
    process = WorkerProcess(Log())
    process.kill()  # not known yet: as soon as it is
    process.on_forked(child.pid)
    assert child.wait(120) == -signal.SIGKILL
    assert child.stdout.read() == b""  # the grandchild held the pipe too
    child.stdout.close()
    assert not is_running(process.pidfd)
    process.kill()  # the number may belong to somebody else now: nothing is sent
    process.on_exited(-9)
    assert process.pidfd == -1
    assert not process.is_alive


def test_orders_are_answered_at_once_when_there_are_any_and_when_they_come() -> None:
    async def main() -> None:
        told: list[int] = []
        desk = CommandServer(lambda process: told.append(process.pid))
        early = asyncio.create_task(desk.handle_poll(0, CommandPoll(7, 0)))
        await asyncio.sleep(0)
        process = _process()
        desk.add(process)  # it asked before its fork was told
        await asyncio.sleep(0)
        assert not early.done()
        process.begin_rank(_begin(0, 3))
        assert (process.rank, process.generation, process.log.path) == (0, 3, Path("log"))
        assert await early == CommandReply(1, _begin(0, 3))
        assert await desk.handle_poll(0, CommandPoll(7, 0)) == CommandReply(1, _begin(0, 3))
        waiting = asyncio.create_task(desk.handle_poll(0, CommandPoll(7, 1)))
        await asyncio.sleep(0)
        assert process.has_acked
        process.halt_rank(3, has_lost_replica_peer=True)
        answer = await waiting
        assert answer == CommandReply(2, Halt(3, is_inside_replica=True))
        assert not process.has_acked
        last = asyncio.create_task(desk.handle_poll(0, CommandPoll(7, 2, HeldState(3, 0, 5))))
        await asyncio.sleep(0)
        assert told == [7]
        assert process.held_state is not None
        process.on_exited(0)
        assert await last == CommandReply(2)

    asyncio.run(main())


def test_what_is_held_counts_for_the_generation_that_was_begun() -> None:
    process = _process()
    process.begin_rank(_begin(0, 3))
    assert not process.record_poll(1, HeldState(2, 0, 5))  # older than the orders
    assert process.record_poll(1, HeldState(3, 0, 6))
    assert not process.record_poll(1, HeldState(3, 0, 6))  # said again
    process.begin_rank(_begin(1, 4))
    assert process.held_state is None
    assert not process.record_poll(1, HeldState(3, 0, 6))
    process.halt_rank(4, has_lost_replica_peer=False)
    assert not process.record_poll(2, HeldState(3, 0, 6))  # it may still begin
    # It has taken the halt and still holds what it held before: it never began.
    assert process.record_poll(3, HeldState(3, 0, 6))


@pytest.mark.parametrize(
    "body", [{}, {"process": "x", "seen": 0}, {"process": 7, "seen": 0, "held": {"rank": 1}}]
)
def test_nonsense_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises((KeyError, ValueError, TypeError)):
        CommandPoll.from_json(body)

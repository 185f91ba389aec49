"""Processes of a node as its agent knows them: orders, reports, output, and their end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.config.sections.cluster import ClusterConfig
from holdfast.elastic.event_log import EventLog
from holdfast.elastic.node import fork_server_supervisor
from holdfast.elastic.node.children import ChildFailedError
from holdfast.elastic.node.output_relay import MAX_WAITING_BYTES, TAIL_BYTES, OutputRelay
from holdfast.elastic.node.process_manager import ProcessManager
from holdfast.elastic.node.worker_group import WorkerGroup
from holdfast.elastic.node.worker_process import CommandServer, WorkerProcess, is_running
from holdfast.elastic.protocol.exit_codes import CRASHED, DONE, USER_ERROR
from holdfast.elastic.protocol.generation_outcome import FinishedOutcome, NodeOutcome
from holdfast.elastic.protocol.worker_commands import Begin, CommandPoll, CommandReply, Halt
from holdfast.elastic.protocol.worker_messages import SCRIPT_END, WorkerOutcome, WorkerReport
from holdfast.elastic.protocol.worker_spec import WorkerSpec
from holdfast.elastic.run_result import run_result
from holdfast.events import RunFinished
from holdfast.layout import Layout, place_replicas
from holdfast.policy.recovery.survivors import HeldState
from holdfast.wire.secret import Secret


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


SENTENCE = "train.py:9: OSError: no folder"


class ExitLog:
    path = Path("rank.log")

    def last_lines(self, count: int) -> str:
        return SENTENCE


class Unheard:
    def emit(self, source: str, event: object) -> None: ...


async def _outcome(codes: list[int], phase: str) -> tuple[Any, list[str]]:
    """The outcome of workers that have applied step 5, and exit with these codes."""
    said: list[str] = []
    group = WorkerGroup(
        place_replicas([Layout()] * len(codes), 1, ("a",) * len(codes)),
        0,
        ClusterConfig(),
        cast(EventLog, Unheard()),
        said.append,
        lambda: None,
        {},
    )
    group.expect_workers(dict(enumerate(range(100, 100 + len(codes)))))
    for rank, code in enumerate(codes):
        done = WorkerOutcome("finished", 5)
        group.process_report(WorkerReport(rank, 5, phase, 1, outcome=done))
        group.on_exited(rank, 100 + rank, code, ExitLog(), "")
    return await asyncio.wait_for(group.outcome, 30), said


@pytest.mark.parametrize(
    ("codes", "phase", "error"),
    [
        ([DONE, DONE], SCRIPT_END, None),
        ([DONE, USER_ERROR], SCRIPT_END, SENTENCE),
        ([-9, DONE], SCRIPT_END, "worker 0 ended after the loop: SIGKILL"),
        ([DONE, CRASHED], "capture", None),
        ([-9, -9], "capture", None),
    ],
)
def test_the_script_of_a_worker_fails_after_the_loop(
    codes: list[int], phase: str, error: str | None
) -> None:
    outcome, said = asyncio.run(_outcome(codes, phase))
    assert outcome == FinishedOutcome(5, script_error=error)
    assert len(said) == sum(code != DONE for code in codes)
    received = NodeOutcome.from_json(NodeOutcome(ending=outcome).to_json())
    assert received.done == outcome
    result = run_result("", "", [FinishedOutcome(5), outcome], "", 5)
    assert result.event == RunFinished(error or "", step=5)
    assert result.exit_code == (2 if error else 0)
    assert (None if result.error is None else str(result.error)) == error


def test_a_template_that_fails_by_a_bug_is_said_and_is_a_failed_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(*_: Any) -> None:
        raise RuntimeError("nobody foresaw this")

    async def nothing(*_: Any) -> None:
        return

    async def scene() -> None:
        said: list[str] = []
        parts = {"node_suffix": "", "run_name": "r", "ensure_running": nothing, "stop": nothing}
        mover = cast(Any, SimpleNamespace(**parts))
        host = ProcessManager(
            mover,
            tmp_path,
            Secret(bytes(range(32))),
            "entry",
            (),
            0,
            on_mover_exit=lambda: None,
            on_fork_server_exit=lambda: None,
            say=said.append,
        )
        await host.ensure_processes(0)  # behind the training: no caller waits for it
        async with asyncio.timeout(30):
            while not said:
                await asyncio.sleep(0)
        assert len(said) == 1
        assert "nobody foresaw this" in said[0]
        with pytest.raises(ChildFailedError, match="nobody foresaw this"):
            await host.ensure_processes(1)
        await host.shut_down()

    monkeypatch.setattr(fork_server_supervisor, "ForkServer", SimpleNamespace(start=start))
    asyncio.run(scene())


def test_lines_are_in_memory_at_once_and_in_the_file_at_the_end(tmp_path: Path) -> None:
    async def body() -> None:
        relay = OutputRelay()
        write_fd, output = relay.open(tmp_path / "logs" / "standby.log")
        os.write(write_fd, b"it begins\n")
        assert output.last_lines(1) == "it begins"
        output.send_to(tmp_path / "logs" / "rank0.log")
        os.write(write_fd, b"it works\nit fails\n")
        os.close(write_fd)
        assert output.last_lines(2) == "it works\nit fails"
        await relay.close()

    asyncio.run(body())
    assert (tmp_path / "logs" / "standby.log").read_text() == "it begins\n"
    assert (tmp_path / "logs" / "rank0.log").read_text() == "it works\nit fails\n"


def test_what_cannot_be_written_is_dropped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("no folder")
    lost = b"x" * 100 + b"\n"

    async def body() -> None:
        relay = OutputRelay()
        write_fd, output = relay.open(tmp_path / "logs" / "rank0.log")
        os.write(write_fd, lost)
        assert output.last_lines(1) == "x" * 100
        async with asyncio.timeout(60):
            while output.dropped_bytes < len(lost):
                await asyncio.sleep(0.01)
        (tmp_path / "logs").unlink()
        os.write(write_fd, b"there is room again\n")
        os.close(write_fd)
        await relay.close()

    asyncio.run(body())
    said = (tmp_path / "logs" / "rank0.log").read_text()
    assert said == f"({len(lost)} bytes of output could not be written)\nthere is room again\n"


def test_a_run_folder_that_was_moved_away_is_not_made_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    log = run / "logs" / "0000000001" / "rank0.log"
    run.mkdir()

    async def body() -> None:
        relay = OutputRelay()
        write_fd, output = relay.open(log)
        os.write(write_fd, b"it begins\n")
        async with asyncio.timeout(60):
            while not log.exists() or not log.stat().st_size:
                await asyncio.sleep(0.01)
        run.rename(tmp_path / "moved")
        os.write(write_fd, b"it was away\n")
        async with asyncio.timeout(60):
            while not output.dropped_bytes:
                await asyncio.sleep(0.01)
        (tmp_path / "moved").rename(run)
        os.write(write_fd, b"it is back\n")
        os.close(write_fd)
        await relay.close()

    asyncio.run(body())
    said = log.read_text()
    assert said.startswith("it begins\n")
    assert said.endswith("it is back\n")


def test_a_file_that_hangs_holds_up_neither_process_nor_agent(tmp_path: Path) -> None:
    """A FIFO without a reader: an attempt to open it waits for ever, as on a disk that hangs."""
    os.mkfifo(tmp_path / "rank0.log")

    async def body() -> tuple[int, str]:
        relay = OutputRelay()
        write_fd, output = relay.open(tmp_path / "rank0.log")
        line, written = b"y" * 1023 + b"\n", 0
        while written < 3 * MAX_WAITING_BYTES:
            written += os.write(write_fd, line)
            if written % (256 << 10) == 0:
                output.last_lines(1)
        os.write(write_fd, b"the last word\n")
        return output.waiting_bytes, output.last_lines(1)

    waiting, last = asyncio.run(body())
    assert waiting <= MAX_WAITING_BYTES
    assert last == "the last word"
    assert TAIL_BYTES < MAX_WAITING_BYTES

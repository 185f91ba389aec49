"""A helper process that was stopped is continued, and killed if that does not help."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from holdfast.elastic.node.fork_server_supervisor import REPLY_TIMEOUT_S, ForkServerSupervisor
from holdfast.elastic.node.hang_monitor import ProcessStat
from holdfast.elastic.node.helper_watch import ENOUGH_CONTINUES, STOPPED_LIMIT_S, HelperWatch
from holdfast.elastic.node.worker_process import CommandServer, WorkerProcess


def test_a_helper_that_stays_stopped_is_continued_and_then_killed() -> None:
    said: list[str] = []
    sent: list[signal.Signals] = []
    is_stopped = True

    def read(pid: int) -> ProcessStat:
        return ProcessStat(is_stopped, 0.0)

    watch = HelperWatch(said.append, read, lambda pid, number: sent.append(number))
    watch.check("mover", None, 0.0)
    for round_ in range(ENOUGH_CONTINUES + 1):
        for share in (0.0, 0.5, 1.0):
            watch.check("mover", 7, 10 * round_ + share * STOPPED_LIMIT_S)
    assert sent == [*[signal.SIGCONT] * ENOUGH_CONTINUES, signal.SIGKILL]
    assert said[0] == "the mover (process 7) was stopped for 0.5 s; the agent continues it"
    assert said[-1].endswith("the agent kills it and starts another")
    watch.check("mover", 8, 100.0)
    is_stopped = False
    watch.check("mover", 8, 101.0)
    is_stopped = True
    watch.check("mover", 8, 102.0)
    assert len(sent) == ENOUGH_CONTINUES + 1, "a short stop counts from its own beginning"


def test_a_fork_server_that_does_not_report_an_exit_is_killed() -> None:
    said: list[str] = []
    settings: Any = None
    listener: Any = None
    log: Any = None
    workers = CommandServer(lambda process: None)
    supervisor = ForkServerSupervisor(settings, workers, listener, said.append)
    worker = subprocess.Popen([sys.executable, "-c", ""])
    hung = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    server: Any = SimpleNamespace(is_alive=True, process=hung)
    supervisor._fork_server = server
    try:
        workers.add(WorkerProcess(log, 0, 1, worker.pid, os.pidfd_open(worker.pid)))
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        start: Any = SimpleNamespace(done=lambda: False)
        supervisor._start = start
        supervisor.kill_if_hung(0.0)
        supervisor.kill_if_hung(9.9)
        assert said == [], "it still imports"
        start.done = lambda: True
        supervisor.kill_if_hung(10.0)
        supervisor.kill_if_hung(10.0 + REPLY_TIMEOUT_S)
        assert said == []
        supervisor.kill_if_hung(10.1 + REPLY_TIMEOUT_S)
        assert said == [f"the fork server (process {hung.pid}) hangs; the agent kills it"]
        assert hung.wait(60) == -signal.SIGKILL
    finally:
        hung.kill()
        worker.wait(60)

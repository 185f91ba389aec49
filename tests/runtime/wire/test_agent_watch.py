"""A stopped agent is continued by its mover, unless a terminal may have stopped it (Ctrl-Z)."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios

import pytest

from tests.support.processes import state, stop
from tests.support.ranks import wait_until

_MOVER = """
import os, sys
from holdfast.wire import agent_watch
print("up", flush=True)
sys.stdin.readline()
print(agent_watch._is_stopped(os.getppid()), flush=True)
agent_watch.watch_agent()
sys.stdin.readline()
"""
_AGENT = (
    "import subprocess, sys; "
    "subprocess.run([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
)


@pytest.mark.parametrize("has_terminal", [False, True])
def test_a_stopped_agent_without_a_terminal_is_continued(has_terminal: bool) -> None:
    leader, follower = pty.openpty()

    def take_terminal() -> None:
        if has_terminal:
            fcntl.ioctl(follower, termios.TIOCSCTTY, 0)

    agent = subprocess.Popen(
        [sys.executable, "-c", _AGENT, _MOVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    try:
        assert agent.stdin is not None
        assert agent.stdout is not None
        assert agent.stdout.readline() == "up\n"
        stop(agent.pid)
        agent.stdin.write("look\n")
        agent.stdin.flush()
        assert agent.stdout.readline().strip() == str(not has_terminal)
        if not has_terminal:
            wait_until(lambda: state(agent.pid) != "T", what="the agent to be continued")
    finally:
        os.kill(agent.pid, signal.SIGCONT)
        agent.communicate("end\n", timeout=60)
        os.close(leader)
        os.close(follower)

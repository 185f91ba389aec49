"""Children end with the pipe, whatever they are doing. Real processes, real SIGKILL."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap

import pytest

from holdfast.wire import lifeline

WAYS = {
    "idle": "threading.Event().wait()",
    # A regular expression that backtracks for ages holds the interpreter lock all the while.
    "holding the interpreter lock": "import re; re.match(r'(a*)*b', 'a' * 64)",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
}


def _child(way: str, read_end: int) -> subprocess.Popen[bytes]:
    script = f"""
        import os, signal, subprocess, sys, threading
        from holdfast.wire import lifeline
        lifeline.watch_lifeline(int(sys.argv[1]))
        # A process of the child's own, that knows nothing of lifelines.
        subprocess.Popen(["sleep", "1000"], stdout=1)
        print("up", flush=True)
        {WAYS[way]}
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(read_end)],
        stdout=subprocess.PIPE,
        pass_fds=(read_end,),
        start_new_session=True,
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_child_and_its_own_children_end(way: str) -> None:
    read_end, write_end = lifeline.open_lifeline()
    child = _child(way, read_end)
    os.close(read_end)
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"up\n"
        if way == "stopped":
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert child.poll() is None
        os.close(write_end)
        assert child.wait(timeout=120) == -signal.SIGKILL
        # The grandchild held the pipe open: its end means that it is gone, too.
        readable, _, _ = select.select([child.stdout], [], [], 60.0)
        assert readable
        assert child.stdout.read() == b""
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()


def test_a_child_that_comes_too_late_ends_at_once() -> None:
    read_end, write_end = lifeline.open_lifeline()
    os.close(write_end)
    child = _child("idle", read_end)
    os.close(read_end)
    assert child.stdout is not None
    child.stdout.close()
    assert child.wait(timeout=120) in (-signal.SIGKILL, lifeline.LIFELINE_EXIT_CODE)


def test_children_of_a_users_code_can_be_terminated() -> None:
    script = """
        import multiprocessing, os, signal, subprocess, sys, threading, time
        from holdfast.wire import lifeline

        def users_code():  # a script runs in a thread
            program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
            forked.start()
            for child in (program, forked):
                child.terminate()
            forked.join(120)
            print(program.wait(120), forked.exitcode)

        lifeline.ignore_agent_signals()
        lifeline.let_children_be_ended()
        thread = threading.Thread(target=users_code)
        thread.start()
        for number in lifeline.AGENT_SIGNALS:
            os.kill(os.getpid(), number)
        thread.join()
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    assert found.stdout.split() == [str(-signal.SIGTERM)] * 2

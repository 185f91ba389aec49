"""Real processes: their title, their modules, and their end with the pipe of their parent."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

import holdfast
from holdfast.data.stages.task_pool import TaskPool
from holdfast.errors import HoldfastError
from holdfast.wire import lifeline
from holdfast.wire.child_command import module_command, paths_for

pytest.importorskip("setproctitle")
CODE = """
import sys
from holdfast.wire.process_title import set_process_title
set_process_title("fork server", "quickstart")
set_process_title("worker 3", "quickstart")
print("ready", flush=True)
sys.stdin.read()
"""


def test_role_rank_and_run_come_first_and_the_command_stays_findable() -> None:
    command = [sys.executable, "-c", CODE, "holdfast.elastic.worker.fork_server", "a" * 200]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        words = psutil.Process(process.pid).cmdline()
        name = psutil.Process(process.pid).name()
        assert process.stdin is not None
        process.stdin.close()
    assert " ".join(words).startswith("holdfast: worker 3 of quickstart | ")
    assert " ".join(words).count("holdfast: ") == 1
    assert name == "rank-3" or sys.platform != "linux", "Slurm reads no name with a space"
    assert "holdfast.elastic.worker.fork_server" in words


def test_a_program_that_uses_the_package_keeps_its_title(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.wire.process_title import is_own_process

    monkeypatch.setattr(sys, "argv", ["/usr/bin/pytest"])
    assert not is_own_process()
    monkeypatch.setattr(sys, "argv", ["/venv/bin/holdfast", "train", "run.yaml"])
    assert is_own_process()


PROGRAM = """\
import atexit, sys
from holdfast.wire.process_end import skip_collections

class Said:
    def __init__(self, word):
        self.word = word
    def __del__(self):
        print(self.word)

if {spared}:
    skip_collections()
atexit.register(print, "registered")
held = Said("held")
log = open(sys.argv[1], "w")
log.write("logged")

def work():
    local = Said("local")

work()
"""


@pytest.mark.parametrize(("spared", "said"), [(True, []), (False, ["held"])])
def test_what_is_registered_runs_and_what_modules_hold_is_left(
    spared: bool, said: list[str], tmp_path: Path
) -> None:
    program = PROGRAM.format(spared=spared)
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "log"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["local", "registered", *said]
    assert (tmp_path / "log").read_text() == "logged"


USERS = "random", "select", "queue", "token", "numpy", "xxhash"


@pytest.fixture
def shadowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with files of a user that are called like modules."""
    for name in USERS:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the user\\'s {name}.py was run')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "module",
    [
        "holdfast.checkpoint.mover.main",
        "holdfast.elastic.notices.ray_probe",
        "holdfast.checkpoint.interop.dcp_metadata",
        "holdfast_lab.chaos.relay",
        "holdfast.cli.main",
    ],
)
def test_a_users_file_is_not_run(shadowed: Path, module: str) -> None:
    """Each child ends soon without the arguments and the input that it needs."""
    done = subprocess.run(
        module_command(module),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
    )
    assert "was run" not in done.stderr + done.stdout


def test_a_preparing_process_does_not_run_it(shadowed: Path) -> None:
    done: list[object] = []
    with TaskPool(1) as pool, pytest.raises(HoldfastError, match=r"KeyError: .unit."):
        pool.run([{"no": "kind"}], done.append)


def test_every_child_is_started_so() -> None:
    """No other line of the package names `-m`."""
    root = Path(holdfast.__file__).parent
    found = [
        path.name for path in root.rglob("*.py") if re.search(r'"-m"', path.read_text("utf-8"))
    ]
    assert found == ["child_command.py"]


def test_the_users_own_path_stays(shadowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shadowed / "lib").mkdir()
    (shadowed / "lib" / "mine.py").write_text("print('mine')")
    monkeypatch.setenv("PYTHONPATH", str(shadowed / "lib"))
    done = subprocess.run(module_command("mine"), capture_output=True, text=True, timeout=120)
    assert done.stdout == "mine\n"


def test_a_workers_function_of_another_package_is_looked_for_last() -> None:
    assert paths_for("holdfast.elastic.worker.main:train") == []
    assert "" not in paths_for("mine:train")


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

"""What `ps` shows of a process."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

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

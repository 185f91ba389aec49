"""Which processes of a node are found, so that a fault hits the one that it names."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from holdfast.launch.node.fleet import Fleet
from tests.support.ranks import wait_until

TEMPLATE = "import os, time\nos.fork() and os.fork()\ntime.sleep(600)"
AGENT = f"""\
import ctypes, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # whoever loses his parent becomes a child of this one
command = [sys.executable, "-c", {TEMPLATE!r}, "holdfast.elastic.worker.fork_server"]
subprocess.Popen(command, start_new_session=True)
time.sleep(600)
"""


def test_workers_are_found_also_when_their_template_has_just_ended(tmp_path: Path) -> None:
    """It is a zombie until the agent looks, and they are the agent's own children."""
    fleet = Fleet(tmp_path, [sys.executable, "-c", AGENT], [])
    try:
        fleet.start("a")
        wait_until(lambda: len(fleet.worker_pids("a")) == 2, what="two workers")
        template, workers = fleet.child_pid("a", "template"), fleet.worker_pids("a")
        assert template is not None
        assert template not in workers
        os.kill(template, signal.SIGKILL)
        wait_until(lambda: fleet.child_pid("a", "template") is None, what="the fork server's end")
        assert Path(f"/proc/{template}").exists(), "as a zombie"
        assert sorted(fleet.worker_pids("a")) == sorted(workers)
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: fleet.worker_pids("a") == [], what="their end")
    finally:
        for pid in reversed(fleet.process_tree("a")):
            os.kill(pid, signal.SIGKILL)
        fleet.kill_all()

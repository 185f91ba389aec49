"""The processes of a cluster: started for long, found again, ended, and looked for afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

from holdfast_platform.clusters.cluster import MARK, ClusterState, Daemon

LEAVE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""
GONE_S = 20.0
"""Seconds that the kernel may take to end a process after SIGKILL."""
_LOOK_S = 0.1


def start(daemon: Daemon, folder: Path) -> str:
    """Start a daemon in a session of its own, which Ctrl-C does not reach. Return PID@START."""
    with (folder / f"{daemon.name}.log").open("ab") as out:
        child = subprocess.Popen(
            daemon.command,
            env=os.environ | dict(daemon.environ) | {MARK: str(folder)},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    return f"{child.pid}@{psutil.Process(child.pid).create_time()}"


def find(process: str) -> psutil.Process | None:
    """Return the process PID@START if it lives."""
    number, _, started = process.partition("@")
    with suppress(psutil.Error, ValueError):
        found = psutil.Process(int(number))
        if str(found.create_time()) == started and not _is_zombie(found):
            return found
    return None


def living(state: ClusterState) -> set[str]:
    """Return the names of the daemons that live."""
    return {name for name, process in state.processes.items() if find(process)}


def all_of(state: ClusterState) -> set[psutil.Process]:
    """Return the daemons, what carries their mark, and all children of these. Never ourselves, or
    those that have started us."""
    ours = {os.getpid(), *(each.pid for each in psutil.Process().parents())}
    roots = [one for each in state.processes.values() if (one := find(each))]
    for process in psutil.process_iter():
        if _is_marked(process.pid, state.folder):
            roots.append(process)
    found = set(roots)
    for root in roots:
        with suppress(psutil.Error):
            found.update(root.children(recursive=True))
    return {each for each in found if each.pid not in ours and not _is_zombie(each)}


def end_all(state: ClusterState) -> tuple[int, set[psutil.Process]]:
    """End all processes of a cluster: SIGTERM, then SIGKILL. Return how many there were, and those
    that are left. The last look finds none: a process may start another one before it ends."""
    seen: set[psutil.Process] = set()
    begun = time.monotonic()
    while True:
        found = all_of(state)
        _send(found - seen, signal.SIGTERM)
        seen |= found
        psutil.wait_procs(list(seen), timeout=0)  # reaps those that we have started
        left = {each for each in seen if each.is_running() and not _is_zombie(each)}
        waited = time.monotonic() - begun
        if not (found or left) or waited > LEAVE_S + GONE_S:
            return len(seen), left | found
        if waited > LEAVE_S:
            _send(left | found, signal.SIGKILL)
        time.sleep(_LOOK_S)


def _is_marked(pid: int, folder: Path) -> bool:
    """Slurm's step daemons overwrite a part of their environment, and psutil reads none behind
    it."""
    with suppress(OSError):
        content = Path(f"/proc/{pid}/environ").read_bytes()
        return f"{MARK}={folder}".encode() in content.split(b"\0")
    return False


def _send(processes: set[psutil.Process], number: signal.Signals) -> None:
    for each in processes:
        with suppress(psutil.Error):
            each.send_signal(number)  # psutil compares the start first


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True

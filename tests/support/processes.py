"""Reads the operating system's state of other processes, and stops one for sure."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.ranks import wait_until

STOPPED = "T"


def state(pid: int) -> str:
    """The letter of proc(5): R runs, S sleeps, T is stopped, Z is a zombie; "" for none at all."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def runs(pid: int) -> bool:
    """Return True if the process has not ended; a zombie that was not reaped has."""
    return state(pid) not in ("", "Z", "X")


def children_of(pid: int, module: str, recursive: bool = False) -> list[psutil.Process]:
    """Those that run a Python module; one that has ended runs nothing, reaped or not."""
    found = []
    for child in psutil.Process(pid).children(recursive=recursive):
        with suppress(psutil.NoSuchProcess):
            if module in child.cmdline():
                found.append(child)
    return found


def stop(pid: int) -> None:
    """Stop a process; return when it has stopped. On busy cores SIGSTOP alone is not immediate. One
    of the threads has to run to take the signal, and until then the other threads continue."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: state(pid) in (STOPPED, "Z", ""), what=f"process {pid} to stop")

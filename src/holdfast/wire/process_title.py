"""Titles of processes, as `ps` and `top` show them: role, rank and run, then the command.

    holdfast: worker 3 of quickstart | python -P -m holdfast.elastic.worker.fork_server ...

The command stays in the title, because tools find processes by the words of their command line.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

SEPARATOR = " | "


def is_own_process() -> bool:
    """Return True if `holdfast` was started as a command. Otherwise the process is its caller's."""
    program = Path(sys.argv[0] if sys.argv else "")
    return program.name == "holdfast" or program.parts[-2:] == ("cli", "main.py")


def set_process_title(role: str, run: str) -> None:
    """Give this process a title. Without `setproctitle`, which some systems cannot build, the
    command line stays as it is: nothing but its looks depends on a title."""
    try:
        titles = import_module("setproctitle")
    except ImportError:
        return
    command = str(titles.getproctitle()).rpartition(SEPARATOR)[2]
    titles.setproctitle(f"holdfast: {role} of {run or 'a run'}{SEPARATOR}{command}")
    if sys.platform == "linux":
        # Without a space: Slurm's proctrack/linuxproc cannot read such a line of /proc, and then
        # neither signals nor kills the process.
        titles.setthreadtitle(role.replace("worker ", "rank ").replace(" ", "-")[:15])

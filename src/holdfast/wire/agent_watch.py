"""Continues an agent that was stopped (SIGSTOP), from its mover.

A stopped agent answers nothing: its node is lost to the run, and a run of one node replaces no
worker. A user who stops a run on purpose stops more than the agent, or has a terminal:

- Ctrl-Z reaches an agent with a terminal, and not its children. Such an agent is left alone.
- A scheduler that suspends a job, or a stopped container, stops the mover too.
- An agent that is stopped again and again is left alone after ENOUGH_CONTINUES times.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

STOPPED_LIMIT_S = 0.5
"""Seconds for which an agent may be stopped: longer than a sender of two signals takes."""
CHECK_INTERVAL_S = 0.25
ENOUGH_CONTINUES = 3

logger = logging.getLogger(__name__)


def watch_agent() -> None:
    """Watch the parent of this process in a thread, as long as it lives."""
    threading.Thread(target=_watch, args=(os.getppid(),), name="agent watch", daemon=True).start()


def _watch(agent: int) -> None:
    for _ in range(ENOUGH_CONTINUES):
        stopped_s = 0.0
        while stopped_s < STOPPED_LIMIT_S:
            begun = time.monotonic()
            time.sleep(CHECK_INTERVAL_S)
            if (stopped := _is_stopped(agent)) is None:
                return
            # If this process was stopped too, as with the entire job, the time does not count.
            slept_s = min(time.monotonic() - begun, 2 * CHECK_INTERVAL_S)
            stopped_s = stopped_s + slept_s if stopped else 0.0
        logger.warning("the agent (process %d) was stopped; its mover continues it", agent)
        with suppress(ProcessLookupError, PermissionError):
            os.kill(agent, signal.SIGCONT)


def _is_stopped(agent: int) -> bool | None:
    """Return True if the process is stopped and has no terminal. None: it is our parent no more, or
    the system has no such file."""
    try:
        line = Path(f"/proc/{agent}/stat").read_text("ascii", "replace")
    except OSError:
        return None
    state, _, _, _, terminal = line.rpartition(")")[2].split()[:5]
    return None if os.getppid() != agent else state == "T" and terminal == "0"

"""Notices that a helper process of a node hangs: its fork server, or its mover.

A recovery waits for both. A process that was stopped (SIGSTOP) answers nothing, so the agent
continues it. If that does not help, it kills the process; the exit is handled as any other.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from holdfast.elastic.event_log import Say
from holdfast.elastic.node.hang_monitor import ProcessStat, read_process_stat

STOPPED_LIMIT_S = 0.5
"""Seconds for which a helper may be stopped: longer than a sender of two signals takes."""
ENOUGH_CONTINUES = 3
"""How often the agent continues one process before it kills it."""


@dataclass(eq=False)
class HelperWatch:
    """Watches the helpers of one node, by process id."""

    say: Say
    read_stat: Callable[[int], ProcessStat | None] = read_process_stat
    send: Callable[[int, signal.Signals], None] = os.kill
    _stopped_since: dict[int, float] = field(default_factory=dict)  # clock, seconds
    _continues: dict[int, int] = field(default_factory=dict)  # how often each was continued

    def check(self, name: str, pid: int | None, now: float) -> None:
        """Continue or kill a helper that was stopped for too long. pid: None if it does not run."""
        if pid is None or (stat := self.read_stat(pid)) is None or not stat.is_stopped:
            self._stopped_since.pop(pid or 0, None)
            return
        seconds = now - self._stopped_since.setdefault(pid, now)
        if seconds < STOPPED_LIMIT_S:
            return
        del self._stopped_since[pid]
        self._continues[pid] = self._continues.get(pid, 0) + 1
        ends = self._continues[pid] > ENOUGH_CONTINUES
        action = "kills it and starts another" if ends else "continues it"
        self.say(f"the {name} (process {pid}) was stopped for {seconds:.1f} s; the agent {action}")
        with suppress(ProcessLookupError):
            self.send(pid, signal.SIGKILL if ends else signal.SIGCONT)

"""Slurm's warnings: signals to the processes of a job.

    SIGUSR1   sbatch --signal=B:USR1@120: that many seconds before the time limit, or up to a minute
              earlier
    SIGTERM   preemption, whose SIGKILL follows after the partition's GraceTime; scancel, a requeue
              and the time limit itself, whose SIGKILL follows after KillWait

`squeue` gives the remaining time: it knows the job's present end, which a preemption moves nearer.
If a SIGTERM comes and the end has not moved, or is over already, KillWait remains. It is read from
Slurm at the start, and `cluster.grace_seconds` overrides it. If squeue does not answer in time,
SLURM_JOB_END_TIME gives the time limit.

The user who starts the job decides whether it is queued again.
"""

from __future__ import annotations

import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from holdfast.elastic.notices.source import (
    Disruption,
    NoticeSource,
    TerminationWarning,
    make_warning,
)
from holdfast.errors import ConfigError

DEFAULT_KILL_WAIT_S = 30.0
"""Slurm's default of KillWait."""
SLURM_COMMAND_TIMEOUT_S = 3.0
SIGNAL_WAIT_S = 30.0
RUNNING_JOB_STATES = frozenset({"RUNNING", "SIGNALING", "RESIZING"})
END_TIME_RETRY_DELAYS_S = (0.2, 0.4)
"""Seconds between requests after a SIGTERM whose reason is not known."""
MIN_END_TIME_SHIFT_S = 5.0
"""Least seconds by which an end must be nearer to count as moved: times are given in whole seconds.
"""


def make_slurm_source(
    grace_s: float, environment: Mapping[str, str], clock: Callable[[], float]
) -> SlurmSource:
    """Return a source for this process's job. Raises ConfigError if it runs in no job."""
    job = environment.get("SLURM_JOB_ID", "")
    if not job.isdigit():
        raise ConfigError(
            "this process runs in no Slurm job: SLURM_JOB_ID is not set",
            where="cluster.notices",
            remedy="start it by sbatch or srun, or use cluster.notices=none",
        )
    return SlurmSource(job, grace_s, environment, clock)


class SlurmSource(NoticeSource):
    def __init__(
        self, job: str, grace_s: float, environment: Mapping[str, str], clock: Callable[[], float]
    ) -> None:
        """grace_s: seconds from SIGTERM to SIGKILL; 0: as Slurm is configured."""
        self._job, self._grace_s = job, grace_s
        self._environment, self._clock = dict(environment), clock
        self._initial_end_time: float | None = None  # the job's end as it was at first
        self._has_read_settings = False
        self._received_signals: list[int] = []
        self._signal_received = threading.Condition()

    def signal_handlers(self) -> Mapping[int, Callable[[], None]]:
        return {
            number: lambda number=number: self.on_signal(number)  # type: ignore[misc]
            for number in (signal.SIGUSR1, signal.SIGTERM)
        }

    def on_signal(self, number: int) -> None:
        """Note a signal to this process. Returns at once."""
        with self._signal_received:
            self._received_signals.append(number)
            self._signal_received.notify_all()

    def poll(self) -> TerminationWarning | None:
        if not self._has_read_settings:
            self._has_read_settings = True
            self.read_settings()
        with self._signal_received:
            if not self._received_signals:
                self._signal_received.wait(SIGNAL_WAIT_S)
            if not self._received_signals:
                return None
            # Both at once: the kill follows SIGTERM.
            number = max(self._received_signals, key=lambda n: n == signal.SIGTERM)
            self._received_signals.clear()
        name = signal.Signals(number).name
        return make_warning(
            self.seconds_until_kill(number), Disruption.GONE, f"slurm: {name}", name
        )

    def read_settings(self) -> None:
        """Read the settings at the start: there is no time for that after a signal."""
        at_first = self._environment.get("SLURM_JOB_END_TIME", "")
        self._initial_end_time = self._read_end_time() or (
            float(at_first) if at_first.isdigit() else None
        )
        if not self._grace_s:
            settings = self._run_command("scontrol", "show", "config")
            found = re.search(r"^KillWait\s*=\s*(\d+) sec", settings, re.MULTILINE)
            self._grace_s = float(found[1]) if found else DEFAULT_KILL_WAIT_S

    def seconds_until_kill(self, number: int) -> float:
        """Return the seconds until the job is killed."""
        now = self._read_end_time()
        if number != signal.SIGTERM:
            end = now or self._initial_end_time
            return self._grace_s if end is None else max(1.0, end - self._clock())
        for wait in END_TIME_RETRY_DELAYS_S:
            if self._is_moved_nearer(now):
                break
            time.sleep(wait)  # Slurm may be quicker to send the signal than to say so
            now = self._read_end_time()
        left = now - self._clock() if now is not None and self._is_moved_nearer(now) else 0.0
        return left if left > 1.0 else self._grace_s

    def _is_moved_nearer(self, end: float | None) -> bool:
        return end is not None and (
            self._initial_end_time is None or end < self._initial_end_time - MIN_END_TIME_SHIFT_S
        )

    def _read_end_time(self) -> float | None:
        """Return when the job will end, in seconds since 1970, by squeue; None if squeue does not
        tell.

        Also return None for a job that does not run any more: squeue then gives the end of its next
        try.
        """
        said = self._run_command(
            "squeue", "--noheader", "--job", self._job, "--format", "%T %e"
        ).split()
        if len(said) != 2 or said[0] not in RUNNING_JOB_STATES:
            return None
        try:
            return datetime.fromisoformat(said[1]).replace(tzinfo=UTC).timestamp()
        except ValueError:
            return None

    def _run_command(self, *command: str) -> str:
        """Return the output of a Slurm command; "" if it fails or takes too long."""
        # Slurm prints times in the caller's time zone.
        environment = self._environment | {"TZ": "UTC", "SLURM_TIME_FORMAT": "standard"}
        try:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                timeout=SLURM_COMMAND_TIMEOUT_S,
                stdin=subprocess.DEVNULL,
                check=False,
            )
        except (OSError, subprocess.SubprocessError):
            return ""
        return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""

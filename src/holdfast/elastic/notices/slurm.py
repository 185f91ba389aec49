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

from holdfast.elastic.notices.source import Meaning, Source, Warned, warned
from holdfast.errors import ConfigError

KILL_WAIT = 30.0
"""Slurm's default of KillWait."""
ANSWER_SECONDS = 3.0
ASK_SECONDS = 30.0
AT_WORK = frozenset({"RUNNING", "SIGNALING", "RESIZING"})
AGAIN = (0.2, 0.4)
"""Seconds between requests after a SIGTERM whose reason is not known."""
MOVED = 5.0
"""Least seconds by which an end must be nearer to count as moved: times are given in whole seconds.
"""


def slurm(grace: float, environment: Mapping[str, str], clock: Callable[[], float]) -> Slurm:
    """Return a source for this process's job. Raises ConfigError if it runs in no job."""
    job = environment.get("SLURM_JOB_ID", "")
    if not job.isdigit():
        raise ConfigError(
            "this process runs in no Slurm job: SLURM_JOB_ID is not set", where="cluster.notices",
            remedy="start it by sbatch or srun, or use none",
        )  # fmt: skip
    return Slurm(job, grace, environment, clock)


class Slurm(Source):
    def __init__(
        self, job: str, grace: float, environment: Mapping[str, str], clock: Callable[[], float]
    ) -> None:
        """grace_s: seconds from SIGTERM to SIGKILL; 0: as Slurm is configured."""
        self._job, self._grace = job, grace
        self._environment, self._clock = dict(environment), clock
        self._first: float | None = None  # the job's end as it was at first
        self._learnt = False
        self._came: list[int] = []
        self._news = threading.Condition()

    def signals(self) -> Mapping[int, Callable[[], None]]:
        return {
            number: lambda number=number: self.signalled(number)  # type: ignore[misc]
            for number in (signal.SIGUSR1, signal.SIGTERM)
        }

    def signalled(self, number: int) -> None:
        """Note a signal to this process. Returns at once."""
        with self._news:
            self._came.append(number)
            self._news.notify_all()

    def ask(self) -> Warned | None:
        if not self._learnt:
            self._learnt = True
            self.learn()
        with self._news:
            if not self._came:
                self._news.wait(ASK_SECONDS)
            if not self._came:
                return None
            # Both at once: the kill follows SIGTERM.
            number = max(self._came, key=lambda n: n == signal.SIGTERM)
            self._came.clear()
        name = signal.Signals(number).name
        return warned(self.left(number), Meaning.GONE, f"slurm: {name}", name)

    def learn(self) -> None:
        """Read the settings at the start: there is no time for that after a signal."""
        at_first = self._environment.get("SLURM_JOB_END_TIME", "")
        self._first = self._end() or (float(at_first) if at_first.isdigit() else None)
        if not self._grace:
            settings = self._says("scontrol", "show", "config")
            found = re.search(r"^KillWait\s*=\s*(\d+) sec", settings, re.MULTILINE)
            self._grace = float(found[1]) if found else KILL_WAIT

    def left(self, number: int) -> float:
        """Return the seconds until the job is killed."""
        now = self._end()
        if number != signal.SIGTERM:
            end = now or self._first
            return self._grace if end is None else max(1.0, end - self._clock())
        for wait in AGAIN:
            if self._nearer(now):
                break
            time.sleep(wait)  # Slurm may be quicker to send the signal than to say so
            now = self._end()
        left = now - self._clock() if now is not None and self._nearer(now) else 0.0
        return left if left > 1.0 else self._grace

    def _nearer(self, end: float | None) -> bool:
        return end is not None and (self._first is None or end < self._first - MOVED)

    def _end(self) -> float | None:
        """Return when the job will end, in seconds since 1970, by squeue; None if squeue does not
        tell.

        Also return None for a job that does not run any more: squeue then gives the end of its next
        try.
        """
        said = self._says("squeue", "--noheader", "--job", self._job, "--format", "%T %e").split()
        if len(said) != 2 or said[0] not in AT_WORK:
            return None
        try:
            return datetime.fromisoformat(said[1]).replace(tzinfo=UTC).timestamp()
        except ValueError:
            return None

    def _says(self, *command: str) -> str:
        """Return the output of a Slurm command; "" if it fails or takes too long."""
        # Slurm prints times in the caller's time zone.
        environment = self._environment | {"TZ": "UTC", "SLURM_TIME_FORMAT": "standard"}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, timeout=ANSWER_SECONDS,
                stdin=subprocess.DEVNULL, check=False,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError):
            return ""
        return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""

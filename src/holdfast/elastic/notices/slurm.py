"""Slurm's warnings: signals to the processes of a job.

    SIGUSR1   sbatch --signal=B:USR1@120: that many seconds before the time limit, or up to a minute
              earlier
    SIGTERM   preemption, whose SIGKILL follows after the partition's GraceTime; scancel, a requeue
              and the time limit itself, whose SIGKILL follows after KillWait

How much is left is asked of `squeue`, which knows the job's end as it is now: a preemption moves it
nearer. After a SIGTERM to a job that ends as late as ever, or that is over already, KillWait is
what is left; Slurm is asked for it at the start, and `cluster.grace_seconds` wins. Where squeue
does not answer in time, SLURM_JOB_END_TIME says when the time limit is.

Whether the job is queued again afterwards is decided by whoever started it.
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
"""Seconds between questions after a SIGTERM whose reason is not known."""
MOVED = 5.0
"""An end that is nearer by less has not been moved: times are told in whole seconds."""


def slurm(grace: float, environment: Mapping[str, str], clock: Callable[[], float]) -> Slurm:
    """Raises ConfigError for a process that runs in no job."""
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
        """`grace`: seconds from SIGTERM to SIGKILL; 0: what Slurm says."""
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
        """This process got a signal. Returns at once."""
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
        """What is not to be asked for when time is short."""
        at_first = self._environment.get("SLURM_JOB_END_TIME", "")
        self._first = self._end() or (float(at_first) if at_first.isdigit() else None)
        if not self._grace:
            settings = self._says("scontrol", "show", "config")
            found = re.search(r"^KillWait\s*=\s*(\d+) sec", settings, re.MULTILINE)
            self._grace = float(found[1]) if found else KILL_WAIT

    def left(self, number: int) -> float:
        """Seconds until the job is killed."""
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
        """When the job will end, in seconds since 1970, as squeue says; None where it does not say,
        and for a job that does not run any more, of which it says when the next try would end."""
        said = self._says("squeue", "--noheader", "--job", self._job, "--format", "%T %e").split()
        if len(said) != 2 or said[0] not in AT_WORK:
            return None
        try:
            return datetime.fromisoformat(said[1]).replace(tzinfo=UTC).timestamp()
        except ValueError:
            return None

    def _says(self, *command: str) -> str:
        """What a command of Slurm's prints, "" where it fails or takes too long."""
        # Times are printed in the zone of whoever asks.
        environment = self._environment | {"TZ": "UTC", "SLURM_TIME_FORMAT": "standard"}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, timeout=ANSWER_SECONDS,
                stdin=subprocess.DEVNULL, check=False,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError):
            return ""
        return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""

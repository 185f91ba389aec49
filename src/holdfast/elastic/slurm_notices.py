"""Slurm's warnings: signals to the processes of a job.

    SIGUSR1   sbatch --signal=B:USR1@120: that many seconds before the time limit, or up to a minute
              earlier
    SIGTERM   preemption, whose SIGKILL follows after the partition's GraceTime; scancel and the
              time limit itself, whose SIGKILL follows after KillWait

How much is left is asked of `squeue`, which knows the job's end as it is now: a preemption moves
it. Where it does not answer in time, SLURM_JOB_END_TIME says when the time limit is. A SIGTERM with
an end far away is somebody's own: then `cluster.grace_seconds`, or Slurm's usual KillWait, counts.

The batch shell gets B: signals, not its children: it has to pass them on (docs/notices.md).
Whether the job is queued again afterwards is decided by whoever started it.
"""

from __future__ import annotations

import math
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from holdfast.elastic.asking import Meaning, Source, Warned, warned
from holdfast.errors import ConfigError

KILL_WAIT = 30.0
"""Slurm's default of KillWait."""
ANSWER_SECONDS = 3.0
ASK_SECONDS = 30.0
FAR_AWAY = 3600.0


def slurm(grace: float, environment: Mapping[str, str], clock: Callable[[], float]) -> Slurm:
    """Raises ConfigError for a process that runs in no job."""
    job = environment.get("SLURM_JOB_ID", "")
    if not job.isdigit():
        raise ConfigError(
            "this process runs in no Slurm job: SLURM_JOB_ID is not set", where="cluster.notices",
            remedy="start it by sbatch or srun, or use none",
        )  # fmt: skip
    return Slurm(job, grace or KILL_WAIT, environment, clock)


class Slurm(Source):
    def __init__(
        self, job: str, grace: float, environment: Mapping[str, str], clock: Callable[[], float]
    ) -> None:
        """`grace`: seconds from SIGTERM to SIGKILL where nobody can say."""
        self._job, self._grace = job, grace
        self._environment, self._clock = dict(environment), clock
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

    def left(self, number: int) -> float:
        """Seconds until the job is killed."""
        end = self._end_now() or self._end_at_first()
        left = end - self._clock() if end is not None else math.inf
        if number == signal.SIGTERM:
            # At the job's end the kill is KillWait away.
            return max(1.0, left) if 1.0 < left < FAR_AWAY else self._grace
        return max(1.0, left) if left < math.inf else self._grace

    def _end_now(self) -> float | None:
        """What squeue says, in seconds since 1970."""
        asked = ["squeue", "--noheader", "--job", self._job, "--format", "%e"]
        # The time is printed in the zone of whoever asks.
        environment = self._environment | {"TZ": "UTC", "SLURM_TIME_FORMAT": "standard"}
        try:
            done = subprocess.run(
                asked, env=environment, capture_output=True, timeout=ANSWER_SECONDS, text=True,
                stdin=subprocess.DEVNULL, check=False,
            )  # fmt: skip
            at = done.stdout.split()[0]
            return datetime.fromisoformat(at).replace(tzinfo=UTC).timestamp()
        except (OSError, ValueError, IndexError, subprocess.SubprocessError):
            return None

    def _end_at_first(self) -> float | None:
        at = self._environment.get("SLURM_JOB_END_TIME", "")
        return float(at) if at.isdigit() else None

"""Ends a session of the run when the signal of the section `pause` is too high.

Only the agent that leads does so. `launch/run/pausing.py` begins the next session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.config.sections.pause import PauseConfig
from holdfast.elastic.event_log import Say
from holdfast.errors import ConfigError, UserError
from holdfast.events import Event, PauseBegun, Record
from holdfast.policy.pausing import PauseLimits, Signal, begins, lasts, pause_in_force, read_signal

_HOUR_S = 3600.0


@dataclass
class PauseSignal:
    """The signal of a run and its limits. The file is read again when it has changed."""

    config: PauseConfig
    _read: tuple[tuple[int, int], Signal] | None = field(default=None, init=False)

    @property
    def limits(self) -> PauseLimits:
        above = self.config.above or 0.0
        below = above if self.config.below is None else self.config.below
        return PauseLimits(above, below, self.config.max_hours * _HOUR_S)

    def read(self) -> Signal:
        """Raises UserError for a file that cannot be read, or says something else."""
        path = Path(self.config.file)
        try:
            status = path.stat()
            version = status.st_mtime_ns, status.st_size
            if self._read is None or self._read[0] != version:
                text = path.read_text("utf-8")
                self._read = version, read_signal(text, str(path), self.config.column)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"pause.file {path} cannot be read: {error}",
                where="pause.file",
                remedy="put it there, or give another place with pause.file=FILE",
            ) from error
        return self._read[1]

    def begins(self, now: float, paused_at: float | None) -> tuple[float | None, float | None]:
        """Return the value if a pause begins at `now`, and the pause that bars one. Raises
        UserError."""
        signal, limits = self.read(), self.limits
        paused_at = pause_in_force(signal, limits, now, paused_at)
        return signal.at(now) if begins(signal, limits, now, paused_at) else None, paused_at

    def lasts(self, now: float, paused_at: float) -> bool:
        """Return True if the pause of that time is not over. Raises UserError."""
        return lasts(self.read(), self.limits, now, paused_at)

    def describe(self, value: float) -> str:
        """Say why the run waits."""
        limits = self.limits
        return (
            f"pause: the value is {value:g}, above {limits.above:g}; training continues at "
            f"{limits.below:g} or less, after {self.config.max_hours:g} h at the latest"
        )


def last_pause(records: Iterable[Record]) -> float | None:
    """Return when the newest pause of a run began, in seconds since 1970; None without one."""
    times = (record.time for record in records if isinstance(record.event, PauseBegun))
    return max(times, default=None)


class PauseWatch:
    """One agent's watch. Lives in one event loop."""

    def __init__(
        self, config: PauseConfig, steps: int, emit: Callable[[Event], None], say: Say
    ) -> None:
        self._signal, self._steps, self._emit, self._say = PauseSignal(config), steps, emit, say
        self.leads: Callable[[], bool] = lambda: False
        """Returns True if this agent leads the run."""
        self.newest_step: Callable[[], int] = lambda: 0
        self.stop: Callable[[str, int], None] = lambda reason, exit_code: None
        """Makes all of the run save and stop, with a reason and an exit code."""
        self._paused_at: float | None = None
        self._problem = ""

    def load(self, records: Iterable[Record]) -> None:
        """Learn of the pauses of earlier sessions."""
        self._paused_at = last_pause(records)

    async def check_forever(self, interval_s: float, clock: Callable[[], float]) -> None:
        """Check every `interval_s` seconds; never ends. clock: of the journal's records."""
        value: float | None = None
        while True:
            await asyncio.sleep(interval_s)
            is_under_way = 0 < self.newest_step() < self._steps  # the end is not put off
            if value is not None or not is_under_way or not self.leads():
                continue
            now = clock()
            try:
                value, self._paused_at = await asyncio.to_thread(
                    self._signal.begins, now, self._paused_at
                )
                self._problem = ""
            except UserError as error:
                self._complain(f"{error}; training continues")
            if value is not None:
                limits = self._signal.limits
                self._emit(PauseBegun(value, limits.above, limits.below, step=self.newest_step()))
                self.stop(self._signal.describe(value), 0)

    def _complain(self, problem: str) -> None:
        if problem != self._problem:
            self._say(problem)
        self._problem = problem

"""Lines that the processes of a run write while they train, one a step: see
`recovering/worker.py`."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


class SilentError(Exception):
    """The expected event did not come."""


@dataclass(frozen=True)
class Line:
    time: float
    step: int
    generation: int
    rank: int
    pid: int
    workers: int


@dataclass(frozen=True)
class Found:
    """One loss. seconds: from the fault to the next committed step. before, after: duration of a
    step before and after the fault. cpu: seconds of all of the machine meanwhile. generation: the
    one of that next step. rung: how the run recovered, from its journal.

    lost: repeated steps. For all systems alike, these are steps that were committed before the
    fault and again after it. The step in flight counts too if its computed part was thrown away. A
    remaining process reports that (a line with its number below zero), or no process remains."""

    seconds: float
    before: float
    after: float
    cpu: float
    lost: int
    generation: int
    rung: int = -1

    @property
    def beyond(self) -> float:
        """Return the seconds beyond one step of the remaining workers."""
        return self.seconds - max(self.before, self.after)

    @property
    def beyond_before(self) -> float:
        """The same beyond a step before it, which is the shorter one where fewer are left."""
        return self.seconds - self.before


class Lines:
    """The file, read as it grows."""

    def __init__(self, path: Path, alive: Callable[[], str], seconds: float = 60.0) -> None:
        """alive: returns "" while the run lives, its last output afterwards."""
        self._path, self._alive, self._seconds = path, alive, seconds
        path.touch()

    def read(self) -> list[Line]:
        out = []
        for text in self._path.read_text().splitlines(keepends=True):
            if text.endswith("\n"):
                when, *rest = text.split()
                out.append(Line(float(when), *map(int, rest)))
        return out

    def until(self, condition: Callable[[list[Line]], bool], what: str) -> list[Line]:
        """Raises SilentError."""
        deadline = time.monotonic() + self._seconds
        while not condition(found := self.read()):
            if time.monotonic() > deadline or self._alive():
                raise SilentError(f"{what} did not come: {self._alive() or 'time is up'}")
            time.sleep(0.02)
        return found

    def steady(self, workers: int, steps: int, after: int = 0) -> list[Line]:
        """Until the newest generation, later than `after`, has so many workers, all of which have
        made so many steps in it."""

        def due(found: list[Line]) -> bool:
            if not found:
                return False
            newest = max(line.generation for line in found)
            here = [line for line in found if line.generation == newest and line.step > 0]
            ranks = {line.rank for line in here if line.workers == workers}
            done = [sum(line.rank == rank for line in here) for rank in ranks]
            return newest > after and len(ranks) == workers and min(done) >= steps

        return self.until(due, f"{workers} workers at work")

    def befall(
        self, deed: Callable[[list[Line]], None], after_steps: int = 3, still: bool = False
    ) -> Found:
        """Do it and wait for the outcome. still: nothing breaks, so the length of the stall counts
        from the last step before the deed."""
        known = self.read()
        newest = max(line.generation for line in known)
        cpu, begun = machine_cpu(), time.time()
        here = [line for line in known if line.generation == newest]
        deed(here)
        found = self.until(
            lambda lines: any(_after(line, newest, begun) for line in lines),
            "a step after the fault",
        )
        cpu = machine_cpu() - cpu
        begun = next((line.time for line in found if line.step == 0 and line.time > begun), begun)
        first = min(line.time for line in found if _after(line, newest, begun))
        reached = next(line.generation for line in found if line.time == first)
        found = self.until(  # on a busy machine other workers may join after fewer
            lambda lines: (
                len(commits(lines, reached)) >= after_steps
                or max(line.generation for line in lines) > reached
            ),
            "steps after the fault",
        )
        old, new = commits(found, newest), commits(found, reached)
        later = [line for line in found if line.time > begun]
        lost = (old.keys() & new.keys()) | {-line.step for line in later if line.step < 0}
        stay = {line.pid for line in later if line.generation == reached}
        if stay.isdisjoint(line.pid for line in here):
            lost.add(max(old) + 1)
        if still:
            begun = max(old.values())
        before = _gap(old)
        after = _gap(new) if len(new) >= after_steps else before  # which is not the longer one
        return Found(first - begun, before, after, cpu, len(lost), reached)


def _after(line: Line, generation: int, begun: float) -> bool:
    return line.generation > generation and line.time > begun and line.step > 0


def commits(lines: list[Line], generation: int) -> dict[int, float]:
    """Return when each step of a generation was committed: no rank applies it before all have
    voted."""
    out: dict[int, float] = {}
    for line in lines:
        if line.generation == generation and line.step > 0:
            out[line.step] = min(line.time, out.get(line.step, line.time))
    return out


def _gap(times: dict[int, float]) -> float:
    """The time of a step, of the last few."""
    ordered = sorted(times.values())[-9:]
    return statistics.median(b - a for a, b in itertools.pairwise(ordered))


def machine_cpu() -> float:
    """Seconds that the machine's cores have computed. On a machine that does nothing else, they are
    those of the run, for any names of its processes and any parent that reaped them."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system = (int(word) for word in words[:3])
    return (user + nice + system) / 100.0

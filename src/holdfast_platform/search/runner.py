"""Runs the trials of a search; each start continues the one before."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from holdfast.errors import ConfigError, RunFolderError
from holdfast.wire.store.publish import replace_file
from holdfast_platform.pipeline.children import LEFT_CODES, Children, is_lost, shell_code
from holdfast_platform.pipeline.stages import LEFT_CODE, NO_RETRY
from holdfast_platform.pipeline.state import LOOK_S, locked, try_lock
from holdfast_platform.search.file import Search
from holdfast_platform.search.suggest import pruned_at, require_optuna, suggest
from holdfast_platform.search.trial import (
    State,
    Trial,
    common_words,
    evaluations,
    failure_of,
    words_of,
)

IDENTITY, REPORT, BEST = "identity", "report.json", "run"
READ_S = 2.0  # between two looks at the evaluations of a trial at work
Say = Callable[[str], None]
MAX_STARTS_WITHOUT_PROGRESS = 3


@dataclass
class _Running:
    """A trial whose process is at work. It changes as the process does."""

    trial: Trial
    lock: TextIO
    process: subprocess.Popen[bytes] | None = None  # None: not started yet
    is_making: bool = False  # the process makes the branch
    is_leaving: bool = False  # it was asked to: the trial is pruned
    reached: int = -1  # newest step that was evaluated when the process started
    vain_starts: int = 0
    next_read: float = 0.0  # on the steady clock


class SearchRunner:
    """Runs one search file."""

    def __init__(self, search: Search, say: Say) -> None:
        self._search, self._say, self._children = search, say, Children()
        self._trials: dict[int, Trial] = {}
        self._running: dict[int, _Running] = {}
        self._stack = ExitStack()  # closes the locks

    def trials(self) -> list[Trial]:
        """Return the trials that have begun, by number. Raises UserError."""
        found = (Trial.read(self._place(number)) for number in range(self._search.trials))
        return [trial for trial in found if trial is not None]

    def run(self) -> int:
        """Run what is not done; return the exit code. Raises UserError."""
        self._require()
        self._search.place.mkdir(parents=True, exist_ok=True)
        self._refuse_other_search()
        lock_of = locked(self._search.place, self._say, lambda: bool(self._children.asked))
        with self._stack, self._children.forward_signals(), lock_of as lock:
            if lock is None:
                return LEFT_CODE
            self._trials = {trial.number: trial for trial in self.trials()}
            is_over = sum(trial.is_over for trial in self._trials.values()) == self._search.trials
            if not is_over and (code := self._begin_together(lock)):
                return code
            code = self._run_trials()
        if code == 0:
            self._report()
        return code

    def _require(self) -> None:
        """Raises ConfigError if a package is missing."""
        require_optuna()

    def _suggest(self, number: int, seen: Sequence[Trial]) -> dict[str, Any]:
        """Return the parameters of a trial. seen: the trials that it may know of."""
        return suggest(self._search, seen, number)

    def _describe(self, trial: Trial) -> str:
        return " ".join(f"{key}={value}" for key, value in trial.parameters.items())

    def _refuse_other_search(self) -> None:
        file, mine = self._search.place / IDENTITY, self._search.identity
        if not file.exists():
            replace_file(file, mine)
        elif file.read_text("utf-8") != mine:
            raise ConfigError(
                "the trials in this folder belong to another search: a key other than trials "
                "differs, or one of the run file",
                where=str(self._search.place),
                remedy="name another folder in the search file",
            )

    def _place(self, number: int) -> Path:
        return self._search.place / f"trials/{number:04}"

    def _begin_together(self, lock: TextIO) -> int:
        """Do what all trials have in common; return the exit code."""
        log = self._search.place / "common.log"
        for what, words in common_words(self._search, self._trunk).items():
            self._say(what)
            vain_starts = 0
            while True:
                child = self._children.start(words, lock, Path(self._search.run).parent, log)
                code = shell_code(child.wait())
                vain_starts += not is_lost(code)
                is_vain = vain_starts > MAX_STARTS_WITHOUT_PROGRESS
                if code in (0, *NO_RETRY) or self._children.asked or is_vain:
                    break
                self._say(f"{what} was lost (exit code {code}); it continues")
            if code:
                self._say(f"{what} ended with exit code {code}; see {log}")
                is_left = self._children.asked and code in LEFT_CODES
                return LEFT_CODE if is_left else code
        return 0

    @property
    def _trunk(self) -> Path:
        return self._search.place / "trunk"

    def _run_trials(self) -> int:
        while True:
            for number in range(self._search.trials):
                if number not in self._running and self._may_begin(number):
                    self._begin(number)
            for running in list(self._running.values()):
                if code := self._look(running):
                    return self._end_all(code)
            are_over = [trial.is_over for trial in self._trials.values()]
            if not self._running and self._children.asked:
                return LEFT_CODE
            if len(are_over) == self._search.trials and all(are_over):
                return 0
            time.sleep(LOOK_S)

    def _seen(self, number: int) -> list[Trial] | None:
        """Return the trials that trial `number` may know of; None if one is not over."""
        seen = [self._trials.get(n) for n in range(number - self._search.parallel + 1)]
        return [t for t in seen if t] if all(t and t.is_over for t in seen) else None

    def _may_begin(self, number: int) -> bool:
        trial = self._trials.get(number)
        if self._children.asked or (trial is not None and trial.is_over):
            return False
        return self._seen(number) is not None

    def _begin(self, number: int) -> None:
        place, trial = self._place(number), self._trials.get(number)
        place.mkdir(parents=True, exist_ok=True)
        if trial is None:
            trial = Trial(number, self._suggest(number, self._seen(number) or ()))
            trial.write(place)
            self._say(f"trial {number}: {self._describe(trial)}")
        self._trials[number] = trial
        lock = self._stack.enter_context((place / ".lock").open("a+"))
        self._running[number] = _Running(trial, lock)

    def _look(self, running: _Running) -> int:
        """Start a trial's process, or see what became of it. Return an exit code that ends the
        search, or 0."""
        place = self._place(running.trial.number)
        if running.process is None:
            if self._children.asked:
                del self._running[running.trial.number]
            elif try_lock(running.lock):  # else a process of an earlier start is at work
                self._start(running, place)
            return 0
        code = running.process.poll()
        if code is None and not self._is_time_to_read(running):
            return 0
        number, seen = running.trial.number, self._seen(running.trial.number) or ()
        values = {} if running.is_making else evaluations(place / "run", self._search.metric)
        at = pruned_at(self._search, seen, number, values)
        if code is None:
            if at is not None and not running.is_leaving:
                running.is_leaving = True
                running.process.terminate()  # it saves, and leaves
            return 0
        code = shell_code(code)
        if running.is_making and code == 0:
            running.process = None
            return 0
        if at is not None:
            until = {step: value for step, value in values.items() if step <= at}
            return self._finish(running, State.PRUNED, until)
        if code == 0 and self._search.steps in values:
            return self._finish(running, State.COMPLETE, values)
        if code == 1 and (why := failure_of(place / "run")):
            self._say(f"trial {number} has failed: {why}")
            return self._finish(running, State.FAILED, {})
        return self._restart(running, code, max(values, default=-1))

    def _is_time_to_read(self, running: _Running) -> bool:
        """Return True if a trial's evaluations are due to be read while it is at work."""
        now = time.monotonic()
        if self._search.prune is None or running.is_leaving or now < running.next_read:
            return False
        running.next_read = now + READ_S
        return True

    def _restart(self, running: _Running, code: int, reached: int) -> int:
        if self._children.asked:
            del self._running[running.trial.number]
            return 0
        vain = running.vain_starts if reached <= running.reached else 0
        vain += not is_lost(code)
        log = self._place(running.trial.number) / "log"
        if code in NO_RETRY or vain > MAX_STARTS_WITHOUT_PROGRESS:
            self._say(f"trial {running.trial.number} ended with exit code {code}; see {log}")
            return code or 1
        self._say(f"trial {running.trial.number} was lost (exit code {code}); it continues")
        running.process, running.reached, running.vain_starts = None, reached, vain
        return 0

    def _start(self, running: _Running, place: Path) -> None:
        search, run, trial = self._search, place / "run", running.trial
        words = words_of(search, self._trunk, run, trial.parameters)
        running.is_making = bool(search.branch_at) and not run.exists()
        running.trial = replace(trial, starts=trial.starts + 1)
        running.trial.write(place)
        log, folder = place / "log", Path(search.run).parent
        running.process = self._children.start(words, running.lock, folder, log)

    def _finish(self, running: _Running, state: State, values: dict[int, float]) -> int:
        value = values[max(values)] if values else None
        trial = replace(running.trial, state=state, value=value, by_step=values)
        trial.write(self._place(trial.number))
        self._trials[trial.number] = trial
        del self._running[trial.number]
        over = sum(each.is_over for each in self._trials.values())
        self._say(
            f"trial {trial.number} is {state}: {self._search.metric} {value} "
            f"({over} of {self._search.trials} are over)"
        )
        return 0

    def _end_all(self, code: int) -> int:
        for running in self._running.values():
            if running.process is not None and running.process.poll() is None:
                running.process.terminate()
                running.process.wait()
        return code

    def _report(self) -> None:
        """Write all trials into a file, and let a link lead to the run of the best one."""
        best = best_of(self._search, list(self._trials.values()))
        rows = [asdict(self._trials[number]) for number in sorted(self._trials)]
        for row in rows:
            del row["starts"]  # equal results give equal bytes, whatever was killed
        report = {"best": best.number, "metric": self._search.metric, "trials": rows}
        replace_file(self._search.place / REPORT, json.dumps(report, indent=1) + "\n")
        link = self._search.place / BEST
        made = link.with_name(f".{BEST}")
        made.unlink(missing_ok=True)
        made.symlink_to(self._place(best.number).relative_to(link.parent) / "run")
        os.replace(made, link)
        what = f"{best.number} ({self._describe(best)}): {best.value}"
        self._say(f"the best is trial {what}; its run: {link}")


def best_of(search: Search, trials: Sequence[Trial]) -> Trial:
    """Return the complete trial with the best value; of equal ones the first. Raises
    RunFolderError if none is complete."""
    sign = 1 if search.direction == "minimize" else -1
    complete = [trial for trial in trials if trial.is_complete and trial.value is not None]
    if not complete:
        raise RunFolderError(
            "no trial is complete",
            where=search.folder,
            remedy="use a space whose runs do not fail, in another folder",
        )
    return min(complete, key=lambda trial: (sign * (trial.value or 0.0), trial.number))

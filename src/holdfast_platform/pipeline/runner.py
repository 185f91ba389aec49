"""Runs the stages of a pipeline, one after another; each start continues the one before."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from holdfast.errors import OverBudgetError, RunFolderError, UserError
from holdfast_platform.pipeline.children import LEFT_CODES, Children, shell_code
from holdfast_platform.pipeline.digests import Digests
from holdfast_platform.pipeline.file import Pipeline, check_run_file, fill, references
from holdfast_platform.pipeline.recipe import Result, changes, key_of, recipe_of
from holdfast_platform.pipeline.stages import (
    LEFT_CODE,
    OWN,
    Kind,
    Stage,
    command_of,
    continues,
    result_path,
)
from holdfast_platform.pipeline.state import LOOK_S, Record, State, locked, records_of

DIGESTS = "digests.json"
NOTED_S = 5.0  # between two notes of the time that a command has taken
Say = Callable[[str], None]


@dataclass(frozen=True)
class Outlook:
    """What a start would do with a stage."""

    stage: Stage
    key: str  # "" if an earlier stage has to run first
    is_done: bool
    why: str  # in words
    folder: Path | None = None
    recipe: dict[str, str] | None = None
    record: Record | None = None


class PipelineRunner:
    """Runs one pipeline file."""

    def __init__(self, pipeline: Pipeline, say: Say) -> None:
        self._pipeline, self._say = pipeline, say
        self._children = Children()
        pipeline.folder.mkdir(parents=True, exist_ok=True)
        self._digests = Digests(pipeline.folder / DIGESTS)
        self._results: dict[tuple[str, str], Result] = {}

    def outlooks(self) -> Iterator[Outlook]:
        """Yield what a start would do, stage by stage. Raises UserError."""
        for stage in self._pipeline.stages:
            outlook = self._look(stage)
            self._take(outlook)
            yield outlook
        self._digests.save()

    def run(self, only: str | None = None) -> int:
        """Run what is not done; return the exit code. only: the one stage to run. Raises
        UserError."""
        if only is not None:
            self._pipeline.stage(only)
        with self._children.forward_signals():
            for stage in self._pipeline.stages:
                outlook = self._look(stage)
                if outlook.is_done:
                    self._say(f"{stage.name}: {outlook.why}")
                elif only in (None, stage.name):
                    if code := self._run_stage(stage, outlook):
                        return code
                    outlook = self._look(stage)
                self._take(outlook)
                if only == stage.name:
                    break
                if self._children.asked and stage is not self._pipeline.stages[-1]:
                    self._say("asked to end; the same command continues")
                    return LEFT_CODE
        return 0

    def _take(self, outlook: Outlook) -> None:
        if outlook.is_done and outlook.record is not None:
            for name, result in (outlook.record.results or {}).items():
                self._results[outlook.stage.name, name] = result

    def _look(self, stage: Stage) -> Outlook:
        for other, result in references(stage.values):
            if (other, result) not in self._results:
                return Outlook(stage, "", False, f"waits for {other}")
        recipe = recipe_of(stage, self._results, self._digests)
        key = key_of(recipe)
        base = self._pipeline.folder / stage.name
        record = Record.read(base / key)
        is_done, why = False, "never ran"
        if record is not None and record.is_done:
            is_done, why = True, f"done (key {key})"
        elif record is not None and record.state is State.DONE:
            why = "its results are missing"
        elif record is not None:
            last = f"ended with exit code {record.exit_code}" if record.exit_code else "was cut off"
            why = f"its last start {last}"
        elif earlier := records_of(base):
            why = "; ".join(changes(earlier[-1].recipe, recipe)[:4])
        return Outlook(stage, key, is_done, why, base / key, recipe, record)

    def _run_stage(self, stage: Stage, outlook: Outlook) -> int:
        """Run a stage's command; return its exit code, 0 if its results are there."""
        if not outlook.key or outlook.folder is None:
            raise RunFolderError(
                f"stage {stage.name} {outlook.why}, which is not done",
                where=str(self._pipeline.path),
                remedy=f"run that one first: --only {outlook.why.removeprefix('waits for ')}",
            )
        base = outlook.folder.parent
        with locked(base, self._say, lambda: bool(self._children.asked)) as lock:
            if lock is None:
                return LEFT_CODE
            outlook = self._look(stage)  # another process may have run it meanwhile
            if outlook.is_done:
                return 0
            self._say(f"{stage.name}: starts ({outlook.why})")
            return self._run_locked(outlook, lock)

    def _run_locked(self, outlook: Outlook, lock: TextIO) -> int:
        stage, folder = outlook.stage, outlook.folder
        assert folder is not None
        self._refuse_spent()
        check_run_file(stage, {key: result.path for key, result in self._results.items()})
        if not continues(stage):
            for name, kind in stage.outputs.items():
                _remove(result_path(folder, name, kind))
        folder.mkdir(parents=True, exist_ok=True)
        before = outlook.record or Record(
            stage.name, outlook.key, outlook.recipe or {}, State.RUNNING
        )
        record = replace(before, state=State.RUNNING, starts=before.starts + 1, exit_code=0)
        record.write(folder)
        record, code = self._run_command(stage, folder, record, lock)
        if code:
            replace(record, state=State.FAILED, exit_code=code).write(folder)
            self._say(f"{stage.name}: ended with exit code {code}; the same command continues")
            return code
        results = {}
        for name, kind in stage.outputs.items():
            path = result_path(folder, name, kind)
            try:
                results[name] = Result(str(path), self._digests.of_result(path, kind))
            except (OSError, UserError) as error:
                replace(record, state=State.FAILED, exit_code=1).write(folder)
                self._say(f"{stage.name}: its {kind} {name} is missing ({error})")
                return 1
        self._digests.save()
        replace(record, state=State.DONE, results=results).write(folder)
        made = ", ".join(f"{name} {each.path}" for name, each in results.items())
        self._say(f"{stage.name}: done: {made}")
        return 0

    def _run_command(
        self, stage: Stage, folder: Path, record: Record, lock: TextIO
    ) -> tuple[Record, int]:
        """Run the command to its end; return the record with the time that it took, and the exit
        code. Raises OverBudgetError."""

        def place(other: str, result: str) -> str:
            if other == OWN and not result:
                return str(folder)
            if other == OWN:
                return str(result_path(folder, result, Kind(stage.outputs[result])))
            return self._results[other, result].path

        words = fill(command_of(stage), place)
        try:
            child = self._children.start(words, lock, self._pipeline.path.absolute().parent)
        except OSError as error:
            raise RunFolderError(
                f"stage {stage.name} cannot start {shlex.quote(words[0])} ({error.strerror})",
                where=stage.where,
                remedy="correct the first word of its command",
            ) from None
        begun = noted = time.monotonic()
        spent_before, is_over_budget = record.seconds, False
        while True:
            with suppress(subprocess.TimeoutExpired):
                code = child.wait(LOOK_S)
                break
            record = replace(record, seconds=spent_before + time.monotonic() - begun)
            if time.monotonic() - noted > NOTED_S:
                noted = time.monotonic()
                record.write(folder)
                if not is_over_budget and self._is_spent():
                    is_over_budget = True
                    child.terminate()
        record = replace(record, seconds=spent_before + time.monotonic() - begun)
        code = shell_code(code)
        if is_over_budget and code:
            record.write(folder)
            self._refuse_spent()
        return record, LEFT_CODE if self._children.asked and code in LEFT_CODES else code

    def _spent_s(self) -> float:
        folders = (self._pipeline.folder / stage.name for stage in self._pipeline.stages)
        return sum(record.seconds for folder in folders for record in records_of(folder))

    def _is_spent(self) -> bool:
        limit = self._pipeline.max_hours
        return limit is not None and self._spent_s() >= limit * 3600

    def _refuse_spent(self) -> None:
        if self._is_spent():
            hours = self._spent_s() / 3600
            raise OverBudgetError(
                f"all stages together have run {hours:.3g} hours, and max_hours is "
                f"{self._pipeline.max_hours:g}",
                where=str(self._pipeline.path),
                remedy="raise max_hours; the same command then continues",
            )


def _remove(path: Path) -> None:
    """Remove what an earlier start left half-made."""
    if path.is_dir():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()

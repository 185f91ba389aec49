"""Plans of earlier searches, in the user's cache folder.

    $XDG_CACHE_HOME/holdfast/plans/MODEL-KEY.json        (or below ~/.cache)

KEY is a digest of all that a search depends on: problem, limits, objective, the run file's rules,
and the planner's own sources. So the same search finds its answer, and a newer planner reads no
older plan. MODEL is a digest of the sources and of the model. A search for the same model on other
machines, or with other limits, begins with the layouts of those plans.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from holdfast.config.sections.run_place import cache_folder
from holdfast.plan.cost.choice import Choice
from holdfast.plan.cost.evaluate import Evaluator, Problem
from holdfast.plan.search.limits import (
    FROM_CACHE,
    SEARCHED_FROM_CACHE,
    Found,
    Limits,
    Objective,
    Phase,
    SearchResult,
)
from holdfast.plan.search.search import search
from holdfast.plan.search.warm_start import first_layouts

_ROOMS = ("plan", "core", "config")
"""Folders of the package whose sources decide what a search finds."""
_TRIED = 4  # plans of the same model that a search begins with, the latest ones
_KEPT = 256  # plans in the folder: the oldest ones are removed


def plan_cache_folder() -> Path:
    """The folder of this user's plans."""
    return Path(cache_folder()) / "holdfast" / "plans"


@dataclass(frozen=True)
class Rules:
    """What a search obeys in addition to its limits."""

    objective: Objective
    allows: Callable[[Choice], bool]
    words: str  # all that `objective` and `allows` depend on, without the problem
    is_timeless: bool = True  # False if the objective depends on the clock


@dataclass
class PlanCache:
    """Searches, and keeps what was found. starts_warm: a search may begin with plans of other
    problems. It may then end with another layout, so nodes that must agree do not use it."""

    folder: Path | None  # None keeps nothing
    starts_warm: bool = True
    notes: list[str] = field(default_factory=list)  # of files that could not be read or written

    def search(self, problem: Problem, limits: Limits, rules: Rules) -> SearchResult:
        """Return the plan of the same search, or search. Raises LayoutError if nothing fits."""
        if self.folder is None:
            return search(problem, limits, rules.objective, allows=rules.allows)
        work = problem.workload  # layouts of other plans with these are of the same model
        own = repr((work.layers, work.sequence, work.precision, work.state))
        model = _digest(planner_digest(), own)[:16]
        key = _digest(planner_digest(), repr((problem, limits)), rules.words)[:32]
        path = self.folder / f"{model}-{key}.json"
        if rules.is_timeless and (kept := self._result(path, problem, rules.objective)):
            return kept
        plans = list(self._plans(model)) if self.starts_warm else []
        known = [Choice.from_json(value) for body in plans for value in body["layouts"]]
        first = first_layouts(problem, limits, rules.objective, rules.allows, known)
        pairs = zip(*map(_phases, plans), strict=True)  # what several searches did
        earlier = [Phase(max(p.work for p in each), min(p.gap for p in each)) for each in pairs]
        found = search(problem, limits, rules.objective, first, rules.allows, earlier)
        if first:
            found = replace(found, source=SEARCHED_FROM_CACHE)
        self._write(path, found)
        return found

    def _result(self, path: Path, problem: Problem, objective: Objective) -> SearchResult | None:
        """The plan of this file with its costs; None if it is none that holds here."""
        body = self._read(path)
        if body is None or (body["is_warm"] and not self.starts_warm):
            return None
        evaluator, found = Evaluator(problem), list[Found]()
        for value in body["layouts"]:
            choice = Choice.from_json(value)
            cost = evaluator.cost(choice)
            found.append(Found(choice, cost, objective(choice, cost)))
        with suppress(OSError):
            os.utime(path)  # the latest ones are kept
        best, *others = found
        numbers = body["tried"], body["bounded"], body["gap"]
        return SearchResult(best, tuple(others), *numbers, FROM_CACHE, _phases(body))

    def _plans(self, model: str) -> Iterator[Mapping[str, Any]]:
        """The latest plans of a model."""
        for path in _by_age(self.folder, f"{model}-*.json")[:_TRIED]:
            if (body := self._read(path)) is not None:
                yield body

    def _read(self, path: Path) -> Mapping[str, Any] | None:
        """What `_write` wrote; None if there is none. A damaged file is removed."""
        try:
            value = json.loads(path.read_text("utf-8"))
            if value["digest"] == _digest(_text(value["plan"])):
                body: Mapping[str, Any] = value["plan"]
                return body
            why = "its digest is another one"
        except FileNotFoundError:
            return None
        except OSError as error:
            self._note(f"the plan cache cannot be read: {path}: {error.strerror}; searching again")
            return None
        except (ValueError, KeyError, TypeError):
            why = "it is no plan"
        self._note(f"the cached plan {path} is damaged ({why}): it is removed, and searched again")
        with suppress(OSError):
            path.unlink()
        return None

    def _write(self, path: Path, found: SearchResult) -> None:
        """Replace the file at once: a reader finds the old or the new one."""
        body = {
            "layouts": [each.choice.to_json() for each in (found.best, *found.runners_up)],
            "tried": found.tried,
            "bounded": found.bounded,
            "gap": found.gap,
            "phases": [[phase.work, phase.gap] for phase in found.phases],
            "is_warm": found.source == SEARCHED_FROM_CACHE,
        }
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(
                json.dumps({"digest": _digest(_text(body)), "plan": body}), "utf-8"
            )
            temporary.replace(path)
            for old in _by_age(path.parent, "*.json")[_KEPT:]:
                old.unlink(missing_ok=True)
        except OSError as error:
            self._note(f"the plan is not kept for the next search: {path}: {error.strerror}")
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _note(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)


@lru_cache(maxsize=1)
def planner_digest() -> str:
    """A digest of the planner's sources and tables."""
    package, digest = Path(__file__).resolve().parents[2], hashlib.sha256()
    for room in _ROOMS:
        for path in sorted((package / room).rglob("*")):
            if path.suffix in (".py", ".csv"):
                digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()


def _phases(body: Mapping[str, Any]) -> tuple[Phase, ...]:
    return tuple(Phase(*phase) for phase in body["phases"])


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _text(body: Mapping[str, Any]) -> str:
    return json.dumps(body, sort_keys=True)


def _by_age(folder: Path | None, pattern: str) -> list[Path]:
    """Files, the latest first. Those that another process removes meanwhile are left out."""
    found = list[tuple[float, Path]]()
    for path in folder.glob(pattern) if folder else ():
        with suppress(OSError):
            found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)]

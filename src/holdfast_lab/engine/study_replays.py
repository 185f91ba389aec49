"""Runs the replays of a study, says how far they are, and keeps them in a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from holdfast_lab.engine.kept_replays import KeptReplays
from holdfast_lab.engine.ledger import Ledger, Sketch
from holdfast_lab.engine.run_journal import JournalObserver
from holdfast_lab.engine.study import Case, Outcome, run_case
from holdfast_lab.traces.events import EventStream

if TYPE_CHECKING:
    from holdfast.cli.plan_request import PlanRequest

_SKETCHES = ("lost_s", "lost_steps", "rto_s")
_BY_TIER = ("saves", "saved_bytes", "read_bytes")


class Progress(AbstractContextManager[object], Protocol):
    """Shows how far a study is, from its entry to its exit."""

    def count(self, words: str, done: int, total: int) -> None: ...


class StudyReplays:
    """The replays of one study. The first one writes the journal of the folder.

    out: the folder of `--out`, or None. total: replays of the study. progress: hears of each.
    """

    def __init__(self, out: Path | None, total: int, progress: Progress) -> None:
        self._out, self._total = out, total
        self._kept = KeptReplays(out)
        self._done = 0
        self._progress = progress

    @contextmanager
    def running(self) -> Iterator[StudyReplays]:
        """Inside, the replays run: progress is shown, and Ctrl-C says what is kept."""
        with self._kept.counted(self._total), self._progress:
            yield self

    @property
    def notes(self) -> list[str]:
        reused = self._kept.reused
        return [f"{reused} of {self._total} replays were kept in {self._out}"] if reused else []

    def outcome(
        self,
        case: Case,
        histories: Sequence[Callable[[], EventStream]],
        tokens: float,
        planned: PlanRequest,
        key: str,
    ) -> Outcome:
        """Simulate a case over each history, or take what an earlier call has kept.

        histories: make one each. tokens: at which a run is done. key: of the case's inputs.
        Raises RunFolderError if `--out` holds something else.
        """
        ledgers = []
        for index, make in enumerate(histories):
            self._progress.count("replays", self._done, self._total)
            name, is_first = f"{key}/{index}", self._done == 0
            is_lost = is_first and self._out and not (self._out / "resolved.json").exists()
            found = None if is_lost else self._kept.get(name)
            if found is None:
                history = make()
                heard = None
                if is_first and self._out:
                    length = history.seconds
                    heard = JournalObserver.in_folder(self._out, planned, case.words, length)
                ledger = run_case(case, [history], tokens, heard).ledgers[0]
                self._kept.put(name, asdict(ledger))
            else:
                ledger = ledger_from(found)
            ledgers.append(ledger)
            self._done += 1
        return Outcome(case, tuple(ledgers))


def ledger_from(state: Mapping[str, Any]) -> Ledger:
    """The ledger whose `asdict` went through JSON."""
    given = dict(state)
    for name in _SKETCHES:
        given[name] = Sketch(**{**given[name], "bins": _by_number(given[name]["bins"])})
    for name in _BY_TIER:
        given[name] = _by_number(given[name])
    return Ledger(**given)


def _by_number(values: Mapping[str, Any]) -> dict[int, Any]:
    return {int(key): value for key, value in values.items()}

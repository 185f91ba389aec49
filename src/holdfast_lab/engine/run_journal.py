"""Writes a simulated run as a run folder: the runtime's own journal, of what did not happen.

`holdfast report` and everything that reads a journal work on it. A step is one line in a short
run. In a long one a line is several steps, and the report says which steps have none.
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import RunFolderError
from holdfast.events import (
    Event,
    GenerationStarted,
    NoticeReceived,
    Record,
    RunFinished,
    RunStarted,
    RunStopped,
    SaveInterval,
    StepDone,
    WorkerLost,
    WorkerReady,
    to_json,
)
from holdfast.wire.journal import segment_key
from holdfast.wire.store.run_store import (
    JOURNAL_PREFIX,
    SIMULATED_FILE,
    SIMULATED_KEY,
    FolderStore,
    RunStore,
)
from holdfast_lab.engine.interfaces import SAVE, Node, SavePlan, Transition
from holdfast_lab.engine.kept_replays import FILE as KEPT_REPLAYS
from holdfast_lab.engine.loop import Simulation
from holdfast_lab.engine.progress import LostWork

if TYPE_CHECKING:
    from holdfast.cli.plan_request import PlanRequest

MOST_LINES = 20_000  # steps that get a line of their own
_WRITER = "simulated"
_HELD = 4_000  # lines that wait until no return to a save can split them


def _drop_unfinished(folder: Path) -> None:
    """Remove a simulated run that has no totals, if nothing else is in the folder."""
    settings, journal = folder / "resolved.json", folder / JOURNAL_PREFIX.rstrip("/")
    if not set(folder.iterdir()) <= {settings, journal}:
        return
    try:
        found = json.loads(settings.read_text("utf-8"))
    except (OSError, ValueError):
        return
    if isinstance(found, dict) and SIMULATED_KEY in found:
        shutil.rmtree(journal, ignore_errors=True)
        settings.unlink()


@dataclass(frozen=True)
class _Steps:
    """Steps first + 1 to last, of one stretch, which ended at `ended`. seconds: of work; blocked:
    of saves."""

    first: int
    last: int
    ended: float
    seconds: float
    blocked: float

    def cut_at(self, step: int) -> tuple[_Steps, _Steps]:
        """The steps up to this one, and those after it."""
        share = (step - self.first) / (self.last - self.first)
        middle = self.ended - (self.seconds + self.blocked) * (1 - share)
        one, other = (share * self.seconds, share * self.blocked), 1 - share
        return (
            _Steps(self.first, step, middle, *one),
            _Steps(step, self.last, self.ended, other * self.seconds, other * self.blocked),
        )


@dataclass
class JournalObserver:
    """Hears of one simulated run. steps_a_line: 1 for a run of few steps."""

    store: RunStore
    name: str
    words: str
    samples: int
    tokens: float
    steps_a_line: int
    generation: int = 0
    _done: int = 0
    _seen_productive: float = 0.0
    _seen_blocked: float = 0.0
    _sequence: int = 0
    _lines: list[bytes] = field(default_factory=list)
    _held: deque[_Steps | tuple[float, Event]] = field(default_factory=deque)
    _is_open: bool = False
    _has_loss: bool = False
    _nodes: frozenset[str] = frozenset()
    _pause: float | None = None
    _intervals: dict[int, float] = field(default_factory=dict)

    @staticmethod
    def in_folder(
        folder: Path, planned: PlanRequest, words: str, seconds: float
    ) -> JournalObserver:
        """Begin the run folder. seconds: that will be simulated. Raises RunFolderError."""
        loaded = planned.loaded
        resolved = {"config": loaded.config.model_dump(mode="json"), SIMULATED_KEY: words}
        store = JournalObserver.begin(folder, resolved)
        step_s = planned.plan.best.cost.step_s
        each = max(1, ceil(seconds / step_s / MOST_LINES)) if seconds < inf else 1
        tokens = planned.problem.workload.step_tokens
        size = loaded.config.train.batch_size
        return JournalObserver(store, loaded.config.name, words, size, tokens, each)

    @staticmethod
    def begin(folder: Path, resolved: Mapping[str, Any]) -> RunStore:
        """An empty run folder with its settings. What an interrupted first replay left is dropped.

        Raises RunFolderError if something else is there.
        """
        _drop_unfinished(folder)
        if any(path.name != KEPT_REPLAYS for path in folder.iterdir()):
            raise RunFolderError(
                "this folder is not empty",
                where=f"command line, --out {folder}",
                remedy="give --out a folder that does not exist; a study continues only with the "
                "same run file, trace and options",
            )
        (folder / "resolved.json").write_text(json.dumps(resolved, indent=1), "utf-8")
        return FolderStore(folder)

    # --- what the engine tells ------------------------------------------------------------------
    def trained(self, simulation: Simulation, seconds: float) -> None:
        progress = simulation.progress
        last = floor(progress.tokens / self.tokens + 1e-6)
        if last <= self._done:
            return
        partial = progress.tokens - last * self.tokens
        done = progress.productive - partial / progress.rate
        ended = simulation.now - partial / progress.rate
        steps = _Steps(
            self._done,
            last,
            ended,
            done - self._seen_productive,
            progress.blocked - self._seen_blocked,
        )
        self._held.append(steps)
        self._done, self._seen_productive = last, done
        self._seen_blocked = progress.blocked
        while len(self._held) > _HELD:
            self._write(self._held.popleft())

    def _hold(self, at: float, event: Event) -> None:
        self._held.append((at, event))

    def lost(self, simulation: Simulation, nodes: Sequence[Node], reason: str) -> None:
        self._has_loss = True
        for node in nodes:
            rank = simulation.used.index(node.name)
            event = WorkerLost(rank, 0, "simulated", "heartbeat", node.name, step=self._done)
            self._hold(simulation.now, event)

    def noticed(self, simulation: Simulation, nodes: Sequence[str], seconds: float) -> None:
        event = NoticeReceived(seconds, list(nodes), False, "notice", step=self._done)
        self._hold(simulation.now, event)

    def changed(self, simulation: Simulation, transition: Transition, lost: LostWork) -> None:
        resumed = floor(lost.saved / self.tokens + 1e-6) if transition.loses == SAVE else self._done
        # Cut the held steps where the run resumes, so that those beyond it count as lost.
        cut: deque[_Steps | tuple[float, Event]] = deque()
        for steps in self._held:
            if isinstance(steps, tuple) or not steps.first < resumed < steps.last:
                cut.append(steps)
                continue
            cut += steps.cut_at(resumed)
        self._held = cut
        self._flush_held()
        now = simulation.now
        if transition.point is None:
            if self._is_open:
                self._emit(now, RunStopped("no nodes for any layout", step=self._done))
                self._is_open = False
        else:
            is_session_new = not self._is_open
            if is_session_new:
                is_again = self.generation > 0
                self._emit(now, RunStarted(self.name, "", "", is_again, step=resumed))
                self._is_open = True
            self._open(simulation, transition, resumed, is_session_new)
        self._done = resumed
        self._seen_productive = simulation.progress.productive
        self._seen_blocked = simulation.progress.blocked

    def planned(self, simulation: Simulation, plan: SavePlan) -> None:
        now = simulation.now
        if self._pause is not None:
            self._hold(now, WorkerReady(0, self._pause, step=self._done))
            self._pause = None
        for each in plan.tiers:
            if self._intervals.get(each.tier) != each.interval_s:
                self._intervals[each.tier] = each.interval_s
                event = SaveInterval(each.tier, each.interval_s, "simulated", step=self._done)
                self._hold(now, event)

    def ended(self, simulation: Simulation) -> None:
        self._flush_held()
        if self._is_open:
            done = simulation.ledger.finished
            event = RunFinished(step=self._done) if done else RunStopped("", step=self._done)
            self._emit(simulation.now, event)
        self._store_lines()
        totals = {"policy": self.words, **simulation.ledger.to_json()}
        self.store.create(SIMULATED_FILE, json.dumps(totals, indent=1).encode())

    # --- lines ----------------------------------------------------------------------------------
    def _open(
        self, simulation: Simulation, transition: Transition, resumed: int, is_session_new: bool
    ) -> None:
        assert transition.point is not None
        self._store_lines()
        self.generation += 1
        self._sequence = 0
        came: list[int | None] | None = None
        if transition.loses != SAVE and self.generation > 1:
            came = list(range(len(simulation.used)))
        topology = {"nodes": list(simulation.used), "layout": transition.point.layout}
        event = GenerationStarted(
            topology,
            self._reason_of(transition, simulation.used, is_session_new),
            rung=transition.rung if self.generation > 1 else -1,
            came_from=came,
            cause=transition.reason or "start",
            step=resumed,
        )
        self._has_loss = False
        self._emit(simulation.now, event)
        self._pause = simulation.pause_left

    def _reason_of(self, transition: Transition, nodes: Sequence[str], is_session_new: bool) -> str:
        """The runtime's word for a change that no loss caused: a report tells those from breaks."""
        before, self._nodes = self._nodes, frozenset(nodes)
        if is_session_new:
            return "start" if self.generation == 1 else "resume"
        if self._has_loss:
            return transition.reason
        return "notice" if self._nodes < before else "node_joined"

    def _flush_held(self) -> None:
        while self._held:
            self._write(self._held.popleft())

    def _write(self, steps: _Steps | tuple[float, Event]) -> None:
        if isinstance(steps, tuple):
            self._emit(*steps)
            return
        number = steps.last - steps.first
        lines = ceil(number / self.steps_a_line)
        each = (steps.seconds + steps.blocked) / number
        place = steps.first
        for index in range(lines):
            stop = steps.last if index == lines - 1 else place + self.steps_a_line
            share = (stop - place) / number
            ended = steps.ended - (steps.last - stop) * each
            event = StepDone(
                loss=0.0,
                tokens=self.tokens * (stop - place),
                grad_norm=0.0,
                learning_rate=0.0,
                seconds=each * (stop - place),
                samples=self.samples * (stop - place),
                phases={"compute": steps.seconds * share, "capture": steps.blocked * share},
                step=stop,
            )
            self._emit(ended, event)
            place = stop

    def _emit(self, at: float, event: Event) -> None:
        record = Record(self.generation, _WRITER, self._sequence, round(at, 6), event)
        self._sequence += 1
        self._lines.append(json.dumps(to_json(record), separators=(",", ":")).encode() + b"\n")
        if len(self._lines) > _HELD:
            self._store_lines()

    def _store_lines(self) -> None:
        if self._lines:
            self.store.append(segment_key(self.generation, _WRITER), b"".join(self._lines))
            self._lines = []

"""The disturbed half of the quickstart: one run on four nodes, and what is done to it.

`Story` follows the run's journal and prints a line for whatever happens. `disturbances` is the list
of what is done, as a person reads it: each does one thing, waits until the run goes on with whom it
should, and leaves a row of the table. What was done is written down beside the run folder, so a
quickstart that was interrupted goes on where it was. A run that another command finished, or that
lies in the place of an older one, was not disturbed, whatever was written down.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.events import (
    Evaluated,
    Event,
    GenerationStarted,
    NoticeReceived,
    Record,
    RunFinished,
    StepDone,
    WorkerHeld,
    WorkerLost,
    WorkerStarted,
)
from holdfast.launch.node.fleet import Fleet
from holdfast.report.formatting import format_clock, format_duration
from holdfast.report.ledger.incidents import describe_rung
from holdfast.report.ledger.ordering import order_records
from holdfast.wire.journal import follow_journal
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import newest_term

try:
    from holdfast_lab.chaos.network import Network, why_unavailable
except ModuleNotFoundError:

    def why_unavailable() -> str | None:
        return "holdfast_lab, which cuts networks, is not installed"


NODES = ("one", "two", "three", "four")
SETTINGS = (
    "cluster.places=1",
    "cluster.min_nodes=2",
    "cluster.gather_seconds=60",
    "cluster.beat_seconds=0.5",
    "cluster.settle_seconds=0.5",
    "cluster.notices=file",
    "cluster.notices_every_seconds=0.2",
)
STEPS_BETWEEN = 25  # undisturbed, before the next thing is done
LINE_EVERY = 50  # steps
PATIENCE = 120.0  # seconds for one disturbance to come to its good end
_NOTICED = (WorkerLost, WorkerHeld, NoticeReceived, GenerationStarted)


@dataclass(frozen=True)
class Row:
    """What one disturbance came to. Seconds are None where nobody could measure them."""

    name: str
    what: str
    step: int = 0  # the newest one before it
    noticed: float | None = None  # from the deed to the first event about it
    rung: int = -1
    pause: float | None = None  # from the last step before to the first one after
    repeated: int = 0
    happened: bool = False


Deed = Callable[[], set[str] | None]
"""Does something; with whom the run is to go on, or None where it was so already."""


class TooLateError(Exception):
    """What was waited for has not come, or cannot come any more."""


class Story:
    """The run's journal as it grows, printed and remembered."""

    def __init__(self, folder: Path, steps: int, alive: Callable[[], list[str]]) -> None:
        """alive: the nodes that are there."""
        self.store, self.steps, self._alive = FolderStore(folder), steps, alive
        self.finished = False
        self.step = 0
        self.generation = 0  # the newest with a step
        self.events: list[Record] = []  # all but steps
        self.done: dict[int, list[tuple[int, float]]] = {}  # generation -> (step, when) of each
        self.nodes: dict[int, list[str]] = {}
        self.pids: dict[str, int] = {}  # node -> the newest process that started there
        self.older = 0  # the newest generation of an earlier start
        self._began = time.monotonic()
        self._line = 0
        self._first: tuple[int, float] | None = None  # generation, and when it began
        self._stop = threading.Event()
        self._batches = follow_journal(self.store, poll_interval_s=0.1, stop=self._stop)

    def say(self, text: str) -> None:
        print(f"  {format_clock(time.monotonic() - self._began):>5}  {text}", flush=True)

    def read(self, *, aloud: bool = True) -> None:
        """Take what is new in the journal."""
        new = next(self._batches)
        starts = [(r.generation, r.time) for r in new if isinstance(r.event, GenerationStarted)]
        if starts and (self._first is None or min(starts) < self._first):
            self._first = min(starts)
        for record in order_records(new):
            self._take(record, aloud)

    @property
    def began(self) -> float | None:
        """When the run did, which tells it from another one in the same folder; None before."""
        return None if self._first is None else self._first[1]

    def read_older(self) -> None:
        """What an earlier start wrote. Its processes have ended, and their numbers may be somebody
        else's by now."""
        self.read(aloud=False)
        self.older = max(self.nodes, default=0)
        self.pids.clear()

    def _take(self, record: Record, aloud: bool) -> None:
        event = record.event
        if isinstance(event, StepDone):
            self.done.setdefault(record.generation, []).append((event.step, record.time))
            self.generation = max(self.generation, record.generation)
            self.step = event.step
            if event.step >= self._line or event.step == self.steps:
                self._line = (event.step // LINE_EVERY + 1) * LINE_EVERY
                if aloud:
                    self.say(f"step {event.step}/{self.steps}  loss {event.loss:.3f}")
            return
        self.events.append(record)
        if isinstance(event, GenerationStarted):
            self.nodes[record.generation] = sorted(set(event.topology["nodes"]), key=_place)
        elif isinstance(event, WorkerStarted):
            self.pids[event.node] = event.pid
        elif isinstance(event, RunFinished):
            self.finished = True
        if aloud and (text := self._words(record, event)):
            self.say(text)

    def _words(self, record: Record, event: Event) -> str:
        if isinstance(event, GenerationStarted):
            who = ", ".join(self.nodes[record.generation])
            how = "" if event.rung < 0 else f": {describe_rung(event.rung)}"
            return f"{who} train on after step {event.step}{how}"
        if isinstance(event, WorkerLost):
            return f"rank {event.rank} is lost: {event.cause}"
        if isinstance(event, NoticeReceived):
            return f"{', '.join(event.nodes)} will be gone in {event.seconds:g} s, says its notice"
        if isinstance(event, Evaluated):
            return f"validation after step {event.step}: {event.bits_per_byte:.3f} bits per byte"
        return "all steps are done" if isinstance(event, RunFinished) else ""

    def until(self, due: Callable[[], bool], seconds: float = PATIENCE) -> None:
        """Read on until it is so. Raises TooLateError."""
        deadline = time.monotonic() + seconds
        while not due():
            self.read()
            if due():
                return
            if self.finished or not self._alive():
                raise TooLateError("the run ended before")
            if time.monotonic() > deadline:
                raise TooLateError(f"not within {seconds:g} s")

    def close(self) -> None:
        self._stop.set()


class Disturbed:
    """Four nodes, and hands that reach for them."""

    def __init__(self, run_file: Path, folder: Path, steps: int, desk: Path) -> None:
        """desk: the folder for what the nodes say, their notices, and what was done so far."""
        self.said, self._warnings = desk / "logs", desk / "notices"
        self._warnings.mkdir(parents=True, exist_ok=True)
        self._notes = desk / "disturbances.json"
        self.rows: list[Row] = []  # of what was tried so far
        self.found_finished = False
        self.why_not = why_unavailable()
        self.network = Network() if self.why_not is None else None
        command = [sys.executable, "-m", "holdfast.cli.main", "train", str(run_file)]
        self.fleet = Fleet(
            self.said, command, SETTINGS, node_settings=self._own, wrap_command=self._wrap
        )
        self.story = Story(folder, steps, lambda: self.fleet.alive_nodes)

    def _own(self, name: str) -> list[str]:
        own = [f"cluster.notices_at={self._warnings / name}"]
        return own if self.network is None else own + self.network.settings(name)

    def _wrap(self, name: str, line: list[str]) -> list[str]:
        return line if self.network is None else [*self.network.command(name), *line]

    # --- the run --------------------------------------------------------------------------------
    def run(self) -> bool:
        """To its last step; whether it got there."""
        self.story.read_older()
        self.rows = self._noted()
        self.found_finished = self.story.finished
        if not self.found_finished:
            self._train()
        return self.story.finished

    def outcome(self) -> list[Row]:
        """A row of each disturbance, in their order, be it only to say that it did not happen."""
        tried = {row.name: row for row in self.rows}
        return [tried.get(name) or Row(name, what) for name, what, _ in disturbances(self)]

    def _train(self) -> None:
        for name in NODES:
            (self._warnings / name).unlink(missing_ok=True)
        try:
            if self.network is not None:
                self.network.up(NODES)
            self.fleet.start(*NODES)
            for name, what, do in disturbances(self):
                if self.story.finished or not self.fleet.alive_nodes:
                    break
                if not any(row.name == name and row.happened for row in self.rows):
                    self._disturb(name, what, do)
            while not self.story.finished and self.fleet.alive_nodes:
                self.story.read()
            self.story.read()
            self._let_end()
        finally:
            self.fleet.kill_all()
            self.story.close()
            if self.network is not None:
                self.network.down()

    def _let_end(self) -> None:
        """Nodes take a moment to leave when the last step is saved."""
        deadline = time.monotonic() + 30
        while self.fleet.alive_nodes and time.monotonic() < deadline:
            self.story.read()

    def _disturb(self, name: str, what: str, do: Deed) -> None:
        """After some quiet steps do it, and wait until the run goes on with whom it says."""
        story = self.story
        self.rows = [row for row in self.rows if row.name != name]
        try:
            story.until(self._quiet)
            before, step, since = story.generation, story.step, time.time()
            members = do()
            if members is None:
                self.rows.append(Row(name, what, step, happened=True))
                return
            story.until(lambda: story.generation > before and self._members() == members)
        except TooLateError as error:
            story.say(f"{what}: did not come to its end ({error})")
            self.rows.append(Row(name, what))
        else:
            row = self._measured(name, what, before, since, step)
            self.rows.append(row)
            again = f"{row.repeated} steps are done again" if row.repeated else "no step is lost"
            story.say(f"training stood still for {_seconds(row.pause)}; {again}\n")
        finally:
            self._note()

    def _note(self) -> None:
        notes = {"began": self.story.began, "rows": [asdict(row) for row in self.rows]}
        self._notes.write_text(json.dumps(notes, indent=1))

    def _noted(self) -> list[Row]:
        """What an earlier start did to this run. What was done to another one, which lay in this
        folder before, does not count."""
        notes = json.loads(self._notes.read_text()) if self._notes.exists() else None
        if not isinstance(notes, dict) or notes["began"] != self.story.began:
            return []
        return [Row(**row) for row in notes["rows"]]

    def _quiet(self) -> bool:
        """Whether the run, as it was started now, has done some steps since the last change."""
        story = self.story
        steps = len(story.done.get(story.generation, ()))
        return story.generation > story.older and steps >= STEPS_BETWEEN

    def _members(self) -> set[str]:
        return set(self.story.nodes.get(self.story.generation, ()))

    def _measured(self, name: str, what: str, before: int, since: float, step: int) -> Row:
        """All nodes stand on one machine here, so all have one clock."""
        story = self.story
        noticed = [
            r.time - since
            for r in story.events
            if isinstance(r.event, _NOTICED) and r.time >= since
        ]
        new = min(g for g in story.done if g > before)
        began = next(
            r.event
            for r in story.events
            if r.generation == new and isinstance(r.event, GenerationStarted)
        )
        old = [(s, at) for g in story.done if g < new for s, at in story.done[g]]
        first = next((at for s, at in story.done[new] if s > began.step), None)
        last = max(at for s, at in old if s <= began.step)
        repeated = sum(
            s > began.step for g, seen in story.done.items() if before <= g < new for s, _ in seen
        )
        pause = None if first is None else first - last
        return Row(name, what, step, min(noticed, default=None), began.rung, pause, repeated, True)

    # --- hands ----------------------------------------------------------------------------------
    @property
    def leader(self) -> str:
        _, holder = newest_term(self.story.store)
        return "" if holder is None else str(holder["node"])

    def kill_worker(self, name: str) -> set[str]:
        self.story.until(lambda: name in self.story.pids)
        pid = self.story.pids[name]
        self.story.say(f"SIGKILL to the worker of {name} (process {pid})")
        os.kill(pid, signal.SIGKILL)
        return set(NODES)

    def kill_leader(self) -> set[str]:
        name = self.leader
        if name not in self.fleet.alive_nodes:
            raise TooLateError(f"{name or 'nobody'} leads, which is none of these nodes")
        self.story.say(f"SIGKILL to {name}, the node that leads; all its processes end with it")
        self.fleet.kill(name)
        return set(NODES) - {name}

    def warn(self, name: str) -> set[str]:
        self.story.say(f"a notice for {name}: gone in 60 seconds")
        (self._warnings / name).write_text("60")
        return set(NODES) - {name}

    def bring_back(self) -> set[str] | None:
        """Who is not there any more is started again, by the same command. After an interruption it
        was started with the others."""
        gone = sorted(set(NODES) - self._members())
        if not gone:
            return None
        for name in gone:
            (self._warnings / name).unlink(missing_ok=True)
            deadline = time.monotonic() + PATIENCE
            while name in self.fleet.alive_nodes and time.monotonic() < deadline:
                self.story.read()  # it is still leaving
            self.story.say(f"{name} is started again")
            self.fleet.start(name)
        return set(NODES)

    def part(self, name: str) -> set[str]:
        if self.network is not None:
            self.story.say(f"the network of {name} is pulled: no packet in, none out")
            self.network.cut(name)
        else:
            self.story.say(f"all processes of {name} are stopped: no answer from there")
            self.fleet.send_signal(name, signal.SIGSTOP)
        return set(NODES) - {name}

    def heal(self, name: str) -> set[str]:
        if self.network is not None:
            self.story.say(f"the network of {name} is plugged in again")
            self.network.heal(name)
        else:
            self.story.say(f"all processes of {name} run again")
            self.fleet.send_signal(name, signal.SIGCONT)
        return set(NODES)


def disturbances(run: Disturbed) -> Iterator[tuple[str, str, Deed]]:
    """(name, what the table says, what is done), in order. Who leads is known only then."""
    parted: list[str] = []

    def follower(number: int) -> str:
        return [name for name in NODES if name != run.leader][number]

    def part() -> set[str]:
        parted.append(follower(2))
        return run.part(parted[0])

    yield "kill", "a worker is killed", lambda: run.kill_worker(follower(0))
    yield "notice", "a node has notice and leaves", lambda: run.warn(follower(1))
    yield "return", "it comes back", run.bring_back
    yield "partition", "a node is cut off", part
    yield "healed", "its network is whole again", lambda: run.heal(parted[0]) if parted else None
    yield "leader", "the leading node is killed", run.kill_leader
    yield "back", "it comes back", run.bring_back


def table(rows: list[Row]) -> str:
    head = ("what happened", "after step", "noticed after", "rung", "stood still", "repeated")
    lines = [head] + [
        (
            row.what,
            str(row.step),
            _seconds(row.noticed),
            "-" if row.rung < 0 else str(row.rung),
            _seconds(row.pause),
            str(row.repeated),
        )
        if row.happened
        else (row.what, "did not happen", "", "", "", "")
        for row in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    shown = []
    for line in lines:
        rest = "  ".join(
            cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)
        )
        shown.append(f"  {line[0].ljust(widths[0])}  {rest}".rstrip())
    return "\n".join(shown)


def _place(node: str) -> tuple[int, str]:
    """Of a node in a list; others, with which a command of its own has trained this run, last."""
    return (NODES.index(node) if node in NODES else len(NODES), node)


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_duration(value)

"""Several nodes of one run, each an agent of its own, started by the real command."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pytest

from holdfast.core.data.lineage import split_effective
from holdfast.events import Event, GenerationStarted, Record, StepDone
from holdfast.wire.store.run_store import FolderStore, RunStore
from holdfast.wire.term import newest_term
from tests.support.commands import apart, start, within, write_run_file
from tests.support.journal_reader import Journal
from tests.support.processes import children_of
from tests.support.rank_times import assert_time_adds_up
from tests.support.ranks import DEADLINE_S, wait_until

E = TypeVar("E", bound=Event)
STORE_VARIABLE = "HOLDFAST_TEST_STORE"
QUICK = (
    "cluster.places=1",
    "cluster.beat_seconds=0.5",
    "cluster.settle_seconds=0.5",
    "cluster.alone_seconds=3",
    "cluster.threads_per_worker=1",
)


def prepared(folder: Path) -> Path:
    """A run file for a tiny model, its dataset made."""
    path = write_run_file(folder)
    within("data", "prepare", path).succeeds()
    return path


def losses_of_one_worker(run_file: Path, *settings: str) -> dict[int, float]:
    """Return the losses by step of an undisturbed reference run."""
    folder = run_file.parent / f"alone{len(list(run_file.parent.glob('alone*')))}"
    apart(
        "train",
        run_file,
        f"folder={folder}",
        *settings,
        "layout.workers=1",
        "cluster.threads_per_worker=1",
        deadline=DEADLINE_S,
    ).succeeds()
    return Nodes(run_file, folder).losses()


class Nodes:
    """A run folder and the agents at work on it."""

    def __init__(self, run_file: Path, folder: Path, *settings: str) -> None:
        self.run_file, self.folder, self.settings = run_file, folder, settings
        self.agents: dict[str, subprocess.Popen[str]] = {}
        self.store: RunStore = FolderStore(folder)
        self.outside = str(folder)
        """The place of the run store, as the test knows it."""
        self._journal = Journal(folder)
        self.said = ""

    def start(self, *names: str, settings: Sequence[str] = (), before: Sequence[str] = ()) -> None:
        """before: what to put before the command (`Network.command`)."""
        for name in names:
            self.agents[name] = start(
                "train",
                self.run_file,
                f"folder={self.place}",
                f"cluster.node={name}",
                *QUICK,
                *self.settings,
                *settings,
                before=[*before, *self.machine(name)],
            )

    def join(self, *names: str, settings: Sequence[str] = ()) -> None:
        """As `start`, by the run folder alone."""
        for name in names:
            command = ("join", self.place, *QUICK, *settings, "--node", name)
            self.agents[name] = start(*command, before=self.machine(name))

    @property
    def place(self) -> str:
        """The place of the run store, as the nodes know it."""
        return self.outside

    def local(self, name: str) -> Path:
        """The folder with the logs and trackers of a node. All share the run folder."""
        return self.folder

    def machine(self, name: str) -> list[str]:
        """What to put before the command of a node, so that it runs on a machine of its own."""
        return []

    def kill(self, name: str) -> None:
        """The agent; its children end with it."""
        agent = self.agents.pop(name)
        agent.kill()
        self._hear(name, agent)

    def signal(self, name: str, number: signal.Signals) -> None:
        """A node that is stopped is stopped with its mover, which would continue the agent."""
        pids = [self.agents[name].pid]
        if number in (signal.SIGSTOP, signal.SIGCONT):
            movers = [p.pid for p in children_of(pids[0], "holdfast.checkpoint.mover.main")]
            pids = [*movers, *pids] if number is signal.SIGSTOP else [*pids, *movers]
        for pid in pids:
            os.kill(pid, number)

    def _hear(self, name: str, agent: subprocess.Popen[str]) -> None:
        with suppress(subprocess.TimeoutExpired):
            out, err = agent.communicate(timeout=20)
            self.said += f"--- {name}\n{out}{err}"

    # --- what the journal says --------------------------------------------------------------
    def records(self) -> list[Record]:
        return self._journal.records()

    def events(self, kind: type[E]) -> list[E]:
        return [r.event for r in self.records() if isinstance(r.event, kind)]

    def losses(self) -> dict[int, float]:
        """Of the steps that count."""
        effective, _ = split_effective(self.records())
        return {r.event.step: r.event.loss for r in effective if isinstance(r.event, StepDone)}

    def assert_same_run(self, undisturbed: dict[int, float], rel: float = 0.0) -> None:
        """Each step once, with the losses of an undisturbed run to this relative difference. Each
        sample once, and each second of each rank in one class."""
        assert self.losses() == pytest.approx(undisturbed, rel=rel, abs=0.0), self.story()
        audit = within("data", "audit", self.outside).succeeds()
        assert "none missing, none twice" in audit.out
        assert_time_adds_up(self.records())

    def nodes(self, generation: int) -> set[str]:
        """Return the nodes of a generation. The set is empty until they are written, even if a step
        of it is."""
        for record in self.records():
            if record.generation == generation and isinstance(record.event, GenerationStarted):
                return set(record.event.topology["nodes"])
        return set()

    @property
    def leader(self) -> str:
        """The node that holds the newest term."""
        _, holder = newest_term(self.store)
        return "" if holder is None else str(holder["node"])

    @property
    def newest(self) -> int:
        """The newest generation in which a step was done."""
        done = [r.generation for r in self.records() if isinstance(r.event, StepDone)]
        return max(done, default=0)

    def wait_step(self, step: int, after: int = 0, nodes: set[str] | None = None) -> None:
        """Until a step of at least that number is done, in a generation later than `after`, of
        these nodes."""

        def due() -> bool:
            found = [
                record.generation
                for record in self.records()
                if isinstance(record.event, StepDone) and record.event.step >= step
            ]
            return any(
                number > after and (nodes is None or self.nodes(number) == nodes)
                for number in set(found)
            )

        self.wait_until(due, f"no step {step} of {nodes}")

    def wait_generation(self, nodes: set[str], after: int = 0) -> None:
        """Until a generation later than `after` has begun, of these nodes."""

        def due() -> bool:
            begun = {
                record.generation
                for record in self.records()
                if isinstance(record.event, GenerationStarted)
            }
            return any(number > after and self.nodes(number) == nodes for number in begun)

        self.wait_until(due, f"no generation of {nodes}")

    def wait_until(self, due: Callable[[], object], otherwise: str) -> None:
        """Fails at once when no agent is left."""

        def is_over() -> object:
            return due() or not self.alive

        wait_until(is_over, what=lambda: f"{otherwise}\n{self.story()}", pause_s=0.05)
        assert due(), f"{otherwise}\n{self.story()}"

    @property
    def alive(self) -> list[str]:
        return [name for name, agent in self.agents.items() if agent.poll() is None]

    def leave(self, *names: str) -> None:
        """Ask these agents to leave; they end well, and no other one is left."""
        for name in names:
            self.signal(name, signal.SIGTERM)
        assert self.end() == dict.fromkeys(names, 0), self.story()

    def end(self) -> dict[str, int]:
        """Exit codes, once all have ended."""
        deadline = time.monotonic() + DEADLINE_S
        codes = {}
        for name, agent in self.agents.items():
            try:
                out, err = agent.communicate(timeout=max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{name} did not end\n{self.story()}") from None
            self.said += f"--- {name}\n{out}{err}"
            codes[name] = agent.returncode
        return codes

    def story(self) -> str:
        """For a test that failed."""
        for name, agent in list(self.agents.items()):
            agent.kill()
            self._hear(name, agent)
        events = [f"{r.generation} {r.writer} {r.event}" for r in self.records()]
        kept = [line for line in events if "batch_fed" not in line and "BatchFed" not in line]
        logs = sorted(self.folder.rglob("logs/**/*.log"))
        texts = "".join(f"--- {p.name}\n{p.read_text()[-1500:]}" for p in logs)
        return "\n".join([self.said, *kept[-60:], texts])


@contextmanager
def nodes_of(run_file: Path, folder: Path, *settings: str) -> Iterator[Nodes]:
    """Run the nodes of a test; no process is left afterwards, for any end of the test.

    The run store is `folder`, or a bucket if HOLDFAST_TEST_STORE is `bucket`."""
    with _new_nodes(run_file, folder, *settings) as nodes:
        try:
            yield nodes
        finally:
            for agent in nodes.agents.values():
                if agent.poll() is None:
                    agent.kill()
                    agent.communicate(timeout=20)


@contextmanager
def _new_nodes(run_file: Path, folder: Path, *settings: str) -> Iterator[Nodes]:
    if not in_bucket():
        yield Nodes(run_file, folder, *settings)
        return
    from tests.support.nodes_in_bucket import new_nodes  # which needs what a bucket needs

    with new_nodes(run_file, folder, *settings) as nodes:
        yield nodes


def in_bucket() -> bool:
    """Return True if the nodes of the tests have a bucket as their run store."""
    return os.environ.get(STORE_VARIABLE) == "bucket"

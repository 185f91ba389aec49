"""A run of real workers and a real mover for `test_generation_loop.py`; its coordinator is the
test."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.run import RunConfig
from holdfast.core.data.data_ledger import LedgerEntry, drop_redundant_stand_ins
from holdfast.core.data.lineage import split_effective
from holdfast.core.sharding.state_table import state_table
from holdfast.elastic.coordinator.ledger_repair import LedgerCoverage
from holdfast.elastic.protocol.worker_spec import WorkerSpec
from holdfast.errors import NonFiniteError
from holdfast.events import (
    BatchFed,
    GenerationStarted,
    Record,
    StepDone,
    WorkerReady,
    event_from_json,
)
from holdfast.layout import Layout, Topology, place_layout
from holdfast.wire.secret import Secret
from tests.support import control_server, fake_nccl
from tests.support.control_server import Control, Desk, controlling
from tests.support.corpus import data_config, make, text_folder, text_source
from tests.support.mover_process import Mover
from tests.support.ranks import DEADLINE_S, RankContext, rank_values, wait_until

STEPS, FAULT = 8, 4


# --- what runs in a worker's process ----------------------------------------------------------
def work(rank: RankContext, boot: dict[str, Any], secret: str, deeds: dict[str, Any]) -> int:
    """A worker from its fork to its exit code. Ranks beyond the topology are standbys. deeds: what
    befalls a rank in a step of the first generation."""
    from holdfast.elastic.worker import main as worker

    world = len(boot["topology"]["nodes"])
    boot |= {"rank": rank.rank if rank.rank < world else -1, "forked": time.monotonic()}
    if deeds.pop("on a device", None):
        fake_nccl.install()
    _prepare_deeds(rank, deeds)
    return worker.run(WorkerSpec.from_json(boot), Secret.from_hex(secret))


def _prepare_deeds(rank: RankContext, deeds: dict[str, Any]) -> None:
    from holdfast.elastic.worker import worker
    from holdfast.elastic.worker.http_store import HttpStore
    from holdfast.training.engine.engine import StepEngine
    from holdfast.training.recover import recover as recovering

    agree = recovering.agree  # type: ignore[attr-defined]
    update = StepEngine.update
    compute, wishes, ask = StepEngine.compute, worker.AgentMembership.requests, HttpStore._ask

    def due(deed: str, generation: int, step: int) -> bool:
        when = deeds.get(deed)
        return when == [generation, rank.rank, step]

    def computing(self: StepEngine, batches: Any) -> None:
        at = self.groups.topology.generation, self.step
        if at[0] == 1:
            rank.mark(f"step{self.step}")
        if any(due(deed, *at) for deed in ("die", "stand still", "raise")):
            # A peer may still be in the exchange of the step before.
            for peer in range(self.groups.topology.world_size):
                rank.wait_mark(f"step{self.step}", peer)
        if due("die", *at):
            os.kill(os.getpid(), signal.SIGKILL)
        if due("stand still", *at):
            rank.mark("still")
            os.kill(os.getpid(), signal.SIGSTOP)
        if due("raise", *at):
            raise MemoryError("the test took all of it")
        if due("not finite", *at):
            raise NonFiniteError(self.step, rank.rank, "norm.weight")
        compute(self, batches)

    def wishing(self: Any, step: int) -> Any:
        if due("wait for a pause", self._generation, step):
            wait_until(lambda: self._reporter.requests.pause_generation, what="a pause")
        return wishes(self, step)

    def asking(self: HttpStore, *args: Any, **more: Any) -> Any:
        if due("die while joining", self._client.generation, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        return ask(self, *args, **more)

    def updating(self: StepEngine, verdict: Any) -> float:
        if due("die in the update", self.groups.topology.generation, self.step):
            os.kill(os.getpid(), signal.SIGKILL)
        if due("tear", self.groups.topology.generation, self.step):
            self.optimizer.apply = tearing  # type: ignore[method-assign]
        return update(self, verdict)

    def tearing(*args: Any) -> None:
        raise MemoryError("the test took all of it")

    def agreeing(control: Any, *args: Any, **more: Any) -> Any:
        if due("stand still while joining", *deeds.get("stand still while joining", [0])[:1], 0):
            os.kill(os.getpid(), signal.SIGSTOP)
        return agree(control, *args, **more)

    recovering.agree = agreeing  # type: ignore[attr-defined]
    StepEngine.update = updating  # type: ignore[method-assign]
    StepEngine.compute = computing  # type: ignore[method-assign]
    worker.AgentMembership.requests = wishing  # type: ignore[method-assign]
    HttpStore._ask = asking  # type: ignore[method-assign]


# --- the other side ---------------------------------------------------------------------------
@dataclass
class Journal:
    """What an agent would have written down; it repairs the ledger as an agent does."""

    ledger: LedgerCoverage
    ranks: dict[int, int] = field(default_factory=dict)  # not ready yet, of the newest generation
    lock: threading.Lock = field(default_factory=threading.Lock)
    records: list[Record] = field(default_factory=list)
    voices: dict[str, int] = field(default_factory=dict)
    pause: int = 0
    speaking: set[tuple[int, int]] = field(default_factory=set)  # generation, rank

    async def report(self, generation: int, body: dict[str, Any]) -> dict[str, Any]:
        self.speaking.add((generation, int(body["rank"])))
        for number, each in enumerate(body["events"], int(body["first"])):
            if number >= self.voices.get(body["voice"], 0):
                event = event_from_json(each["kind"], each["event"])
                self._add(Record(generation, f"rank{body['rank']}", number, 0.0, event))
                self.voices[body["voice"]] = number + 1
        return {"stop": False, "generation": generation, "stored": True, "pause": self.pause}

    def begin(
        self, topology: Topology, step: int, came_from: Sequence[int | None] | None = None
    ) -> None:
        came = None if came_from is None else list(came_from)
        event = GenerationStarted({}, "", came_from=came, step=step)
        self.ranks = {topology.generation: topology.world_size}
        self._add(Record(topology.generation, "agent", 0, 0.0, event))

    def _add(self, record: Record) -> None:
        with self.lock:
            self.records.append(record)
            self.ledger.observe(record.event)
            if isinstance(record.event, WorkerReady) and record.generation in self.ranks:
                self.ranks[record.generation] -= 1
                if not self.ranks[record.generation]:
                    self._repair_ledger(record.generation)

    def _repair_ledger(self, generation: int) -> None:
        """As `LedgerRepair.repair`, when every worker has sent its entries."""
        missing = self.ledger.find_missing()
        for number, event in enumerate(self.ledger.make_entries(missing) if missing else ()):
            self.records.append(Record(generation, "agent", number + 1, 0.0, event))
        self.ledger.mark_complete(self.ledger.end_position)

    def losses(self) -> dict[int, float]:
        """By step, of what counts; a step is there once."""
        done = [r.event for r in split_effective(self.records)[0] if isinstance(r.event, StepDone)]
        assert len({e.step for e in done}) == len(done), "a step counts twice"
        return {e.step: e.loss for e in done}

    def fed(self) -> list[tuple[int, int]]:
        """(step, sample position) of what counts."""
        fed: dict[int, list[LedgerEntry]] = {}
        for event in (r.event for r in split_effective(self.records)[0]):
            if isinstance(event, BatchFed):
                made = [
                    LedgerEntry.from_json(event.step, event.rank, entry) for entry in event.entries
                ]
                fed.setdefault(event.step, []).extend(made)
        return sorted(
            (step, position)
            for step, entries in fed.items()
            for entry in drop_redundant_stand_ins(entries)
            for position in range(*entry.range)
        )


@dataclass
class Run:
    """One run with its coordinator's means."""

    config: RunConfig
    folder: Path
    boot: WorkerSpec
    mover: Mover
    control: Control
    desk: Desk
    journal: Journal
    processes: int

    def pid(self, number: int) -> int:
        path = self.folder / f"rank{number}.pid"
        wait_until(path.exists, DEADLINE_S, f"process {number}")
        return int(path.read_text())

    def wait_held(self, numbers: Sequence[int], generation: int) -> list[dict[str, Any]]:
        """What these processes hold, as soon as all have stopped in the generation."""
        pids = [self.pid(number) for number in numbers]

        def all_hold() -> bool:
            held = [self.desk.held.get(pid) for pid in pids]
            return all(h is not None and h["generation"] >= generation for h in held)

        wait_until(all_hold, DEADLINE_S, f"processes {numbers} to hold in {generation}")
        return [self.desk.held[pid] for pid in pids]

    def halt(self, numbers: Sequence[int], generation: int, *, inside: bool = True) -> None:
        for number in numbers:
            orders = {"kind": "halt", "inside": inside, "generation": generation}
            self.desk.give(self.pid(number), orders)

    def begin(
        self,
        topology: Topology,
        numbers: Sequence[int],
        step: int,
        *,
        came_from: Sequence[int | None] | None = None,
        before: Topology | None = None,
        restore: str | None = None,
        opened: bool = False,
    ) -> None:
        """Open a generation and give every rank to a process. opened: the mover has done so."""
        table = state_table(self.config.model, self.config.train.precision)
        if not opened:
            self.mover.begin(topology, table)
        self.control.begin(topology.generation)
        self.journal.begin(topology, step, came_from)
        for rank, number in enumerate(numbers):
            boot = replace(
                self.boot,
                topology=topology,
                generation=topology.generation,
                rank=rank,
                restore_key=restore,
                start_step=step,
            )
            told = before and {"topology": before.to_json(), "step": step}
            self.desk.give(
                self.pid(number),
                {
                    "kind": "begin",
                    "boot": boot.to_json(),
                    "before": told,
                    "came_from": None if came_from is None else list(came_from),
                },
            )

    def kill(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid(number), signal.SIGKILL)


def config_in(folder: Path) -> RunConfig:
    """Of a tiny model with its dataset."""
    text_folder(folder / "text", 12, 400)
    data = data_config(folder / "data", text_source(folder / "text"))
    return RunConfig.model_validate(
        {
            "data": data.model_dump(),
            "model": {
                "preset": None,
                "layers": 2,
                "dim": 16,
                "heads": 2,
                "kv_heads": 2,
                "ffn_dim": 24,
                "vocab_size": make(data).vocab_size,
            },
            "train": {
                "steps": STEPS,
                "batch_size": 12,
                "microbatch_size": 2,
                "precision": "float64",
                "optimizer": {"clip_norm": 0.05},
                "evaluate": {"every": 0},
            },
        }
    )


def one_node(ranks: int) -> tuple[str, ...]:
    return ("node0",) * ranks


def run(
    folder: Path,
    config: RunConfig,
    topology: Topology,
    monkeypatch: pytest.MonkeyPatch,
    script: Callable[[Run], None] | None = None,
    *,
    standbys: int = 0,
    deeds: dict[str, list[int]] | None = None,
    dies: Sequence[int] = (),
    on_device: bool = False,
) -> Journal:
    """Real workers from the first step to the last. script: what the coordinator does meanwhile.
    deeds: {what: [generation, process, step]}. dies: the processes that are killed. on_device: the
    workers communicate by `fake_nccl`."""
    (folder / "run").mkdir(parents=True)
    (folder / "ranks").mkdir()
    mover = Mover(folder / "run", run=config.name)
    monkeypatch.setattr(control_server, "SECRET", mover.secret)
    folder_of_data = {"data": {**config.data.model_dump(), "folder": str(make(config.data).folder)}}
    prepared = RunConfig.model_validate({**config.model_dump(), **folder_of_data})
    journal, desk = Journal(LedgerCoverage(prepared)), Desk()
    journal.begin(topology, 0)
    processes = topology.world_size + standbys
    try:
        mover.begin(topology, state_table(config.model, config.train.precision))
        with controlling(journal.report, desk=desk) as control:
            boot = WorkerSpec(
                config.model_dump(mode="json"),
                topology,
                1,
                0,
                1,
                control.address,
                mover.socket,
                str(folder / "run"),
                str(make(config.data).folder),
                None,
                0,
                "cpu",
                "",
                heartbeat_seconds=0.05,
            )
            run = Run(config, folder / "ranks", boot, mover, control, desk, journal, processes)
            with _scripted(run, script):
                arguments = {
                    "boot": boot.to_json(),
                    "secret": mover.secret.hex(),
                    "deeds": (deeds or {}) | {"on a device": on_device},
                }
                codes = rank_values(
                    work,
                    processes,
                    arguments,
                    deadline=240,
                    folder=run.folder,
                    dies=dict.fromkeys(dies, "SIGKILL"),
                )
        assert [c for n, c in enumerate(codes) if n not in dies] == [0] * (processes - len(dies))
        return journal
    finally:
        mover.close()


@contextmanager
def _scripted(run: Run, script: Callable[[Run], None] | None) -> Iterator[None]:
    """The script in a thread; where it fails, the processes are ended, and its error is raised."""
    failed: list[BaseException] = []

    def play() -> None:
        try:
            assert script is not None
            script(run)
        except BaseException as error:
            failed.append(error)
            for number in range(run.processes):
                run.kill(number)

    thread = threading.Thread(target=play if script is not None else lambda: None)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        if failed:
            raise failed[0]


@dataclass(frozen=True)
class Undisturbed:
    """What a run gives that nothing disturbs. fed: (step, sample position)."""

    config: RunConfig
    losses: dict[int, float]
    fed: list[tuple[int, int]]


def undisturbed(folder: Path) -> Undisturbed:
    """One worker on the CPU, from the first step to the last."""
    with pytest.MonkeyPatch.context() as patch:
        config = config_in(folder)
        journal = run(folder / "alone", config, place_layout(Layout(), 1, one_node(1)), patch)
    losses = journal.losses()
    assert sorted(losses) == list(range(1, STEPS + 1))
    return Undisturbed(config, losses, journal.fed())

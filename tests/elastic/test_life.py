"""Processes that outlive generations: real workers, a real mover; the coordinator is the test.

Each run is compared with one that nobody disturbed: the same loss at every step (to the last bit
where only replicas changed) and every sample once, read from what the journal would say.
"""

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

from holdfast.checkpoint.restore import newest_verified
from holdfast.config.run import RunConfig
from holdfast.elastic.boot import WorkerBoot
from holdfast.errors import NonFiniteError
from holdfast.events import BatchFed, GenerationStarted, Record, StepDone, event_from_json
from holdfast.layout import Layout, Topology, place
from holdfast.spec.ledger import Entry, settled
from holdfast.spec.lineage import split
from holdfast.spec.state import state_table
from holdfast.wire.runstore import FolderStore
from holdfast.wire.secret import Secret
from tests.checkpoint.support import Mover
from tests.data.corpus import data_config, make, text_folder, text_source
from tests.elastic import control as control_server
from tests.elastic.control import Control, Desk, controlling
from tests.ranks import RankContext, rank_values, wait_until

STEPS, FAULT = 8, 4
SECONDS = 60.0


# --- what runs in a worker's process ----------------------------------------------------------
def _work(rank: RankContext, boot: dict[str, Any], secret: str, deeds: dict[str, Any]) -> int:
    """A worker from its fork to its exit code. Ranks beyond the topology are standbys. deeds: what
    befalls a rank in a step of the first generation."""
    from holdfast.elastic.worker import main as worker

    world = len(boot["topology"]["nodes"])
    boot |= {"rank": rank.rank if rank.rank < world else -1, "forked": time.monotonic()}
    _prepare_deeds(rank, deeds)
    return worker.run(WorkerBoot.from_json(boot), Secret.from_hex(secret))


def _prepare_deeds(rank: RankContext, deeds: dict[str, Any]) -> None:
    from holdfast.elastic.worker import main as worker
    from holdfast.elastic.worker.store import HttpStore
    from holdfast.train import recover as recovering
    from holdfast.train.engine import StepEngine

    agree = recovering.agree  # type: ignore[attr-defined]
    update = StepEngine.update
    compute, wishes, ask = StepEngine.compute, worker.AgentMembership.wishes, HttpStore._ask

    def due(deed: str, generation: int, step: int) -> bool:
        when = deeds.get(deed)
        return when == [generation, rank.rank, step]

    def computing(self: StepEngine, batches: Any) -> None:
        at = self.groups.topology.generation, self._step
        if due("die", *at):
            os.kill(os.getpid(), signal.SIGKILL)
        if due("stand still", *at):
            rank.mark("still")
            os.kill(os.getpid(), signal.SIGSTOP)
        if due("raise", *at):
            raise MemoryError("the test took all of it")
        if due("not finite", *at):
            raise NonFiniteError(self._step, rank.rank, "norm.weight")
        compute(self, batches)

    def wishing(self: Any, step: int) -> Any:
        if due("wait for a pause", self._generation, step):
            wait_until(lambda: self._reporter.wishes.pause, SECONDS, "a pause")
        return wishes(self, step)

    def asking(self: HttpStore, *args: Any, **more: Any) -> Any:
        if due("die while joining", self._client.generation, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        return ask(self, *args, **more)

    def updating(self: StepEngine, verdict: Any) -> float:
        if due("die in the update", self.groups.topology.generation, self._step):
            os.kill(os.getpid(), signal.SIGKILL)
        if due("tear", self.groups.topology.generation, self._step):
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
    worker.AgentMembership.wishes = wishing  # type: ignore[method-assign]
    HttpStore._ask = asking  # type: ignore[method-assign]


# --- the other side ---------------------------------------------------------------------------
@dataclass
class Journal:
    """What an agent would have written down."""

    records: list[Record] = field(default_factory=list)
    voices: dict[str, int] = field(default_factory=dict)
    pause: int = 0

    async def report(self, generation: int, body: dict[str, Any]) -> dict[str, Any]:
        for number, each in enumerate(body["events"], int(body["first"])):
            if number >= self.voices.get(body["voice"], 0):
                event = event_from_json(each["kind"], each["event"])
                self.records.append(Record(generation, f"rank{body['rank']}", number, 0.0, event))
                self.voices[body["voice"]] = number + 1
        return {"stop": False, "generation": generation, "stored": True, "pause": self.pause}

    def begin(self, generation: int, step: int) -> None:
        event = GenerationStarted("", {}, step=step)
        self.records.append(Record(generation, "agent", 0, 0.0, event))

    def losses(self) -> dict[int, float]:
        """By step, of what counts; a step is there once."""
        done = [r.event for r in split(self.records)[0] if isinstance(r.event, StepDone)]
        assert len({e.step for e in done}) == len(done), "a step counts twice"
        return {e.step: e.loss for e in done}

    def fed(self) -> list[tuple[int, int]]:
        """(step, sample position) of what counts."""
        fed: dict[int, list[Entry]] = {}
        for event in (r.event for r in split(self.records)[0]):
            if isinstance(event, BatchFed):
                made = [Entry.from_json(event.step, event.rank, entry) for entry in event.entries]
                fed.setdefault(event.step, []).extend(made)
        return sorted(
            (step, position)
            for step, entries in fed.items()
            for entry in settled(entries)
            for position in range(*entry.range)
        )


@dataclass
class Run:
    """One run with its coordinator's means."""

    config: RunConfig
    folder: Path
    boot: WorkerBoot
    mover: Mover
    control: Control
    desk: Desk
    journal: Journal
    processes: int

    def pid(self, number: int) -> int:
        path = self.folder / f"rank{number}.pid"
        wait_until(path.exists, SECONDS, f"process {number}")
        return int(path.read_text())

    def wait_held(self, numbers: Sequence[int], generation: int) -> list[dict[str, Any]]:
        """What these processes hold, as soon as all have stopped in the generation."""
        pids = [self.pid(number) for number in numbers]

        def all_hold() -> bool:
            held = [self.desk.held.get(pid) for pid in pids]
            return all(h is not None and h["generation"] >= generation for h in held)

        wait_until(all_hold, SECONDS, f"processes {numbers} to hold in {generation}")
        return [self.desk.held[pid] for pid in pids]

    def halt(self, numbers: Sequence[int], generation: int, *, inside: bool = True) -> None:
        for number in numbers:
            orders = {"kind": "halt", "inside": inside, "generation": generation}
            self.desk.give(self.pid(number), orders)

    def begin(
        self, topology: Topology, numbers: Sequence[int], step: int, *,
        came_from: Sequence[int | None] | None = None, before: Topology | None = None,
        restore: str | None = None, opened: bool = False,
    ) -> None:  # fmt: skip
        """Open a generation and give every rank to a process. opened: the mover has done so."""
        table = state_table(self.config.model, self.config.train.precision)
        if not opened:
            self.mover.begin(topology, table)
        self.control.begin(topology.generation)
        self.journal.begin(topology.generation, step)
        for rank, number in enumerate(numbers):
            boot = replace(
                self.boot, topology=topology.to_json(), generation=topology.generation,
                rank=rank, restore_key=restore, start_step=step,
            )  # fmt: skip
            told = before and {"topology": before.to_json(), "step": step}
            self.desk.give(self.pid(number), {
                "kind": "begin", "boot": boot.to_json(), "before": told,
                "came_from": None if came_from is None else list(came_from),
            })  # fmt: skip

    def kill(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid(number), signal.SIGKILL)


def _config(folder: Path, **checkpoint: Any) -> RunConfig:
    text_folder(folder / "text", 12, 400)
    data = data_config(folder / "data", text_source(folder / "text"))
    return RunConfig.model_validate({
        "data": data.model_dump(),
        "model": {"preset": None, "layers": 2, "dim": 16, "heads": 2, "kv_heads": 2, "ffn_dim": 24,
                  "vocab_size": make(data).vocab_size},
        "train": {"steps": STEPS, "batch_size": 12, "microbatch_size": 2, "precision": "float64",
                  "optimizer": {"clip_norm": 0.05}, "evaluate": {"every": 0}},
        "checkpoint": checkpoint,
    })  # fmt: skip


def _nodes(ranks: int) -> tuple[str, ...]:
    return ("node0",) * ranks


def _run(
    folder: Path, config: RunConfig, topology: Topology, monkeypatch: pytest.MonkeyPatch,
    script: Callable[[Run], None] | None = None, *, standbys: int = 0,
    deeds: dict[str, list[int]] | None = None, dies: Sequence[int] = (),
) -> Journal:  # fmt: skip
    """Real workers from the first step to the last. script: what the coordinator does meanwhile.
    deeds: {what: [generation, process, step]}. dies: the processes that are killed."""
    (folder / "run").mkdir(parents=True)
    (folder / "ranks").mkdir()
    mover = Mover(folder / "run", run=config.name)
    monkeypatch.setattr(control_server, "SECRET", mover.secret)
    journal, desk = Journal(), Desk()
    journal.begin(1, 0)
    processes = topology.world_size + standbys
    try:
        mover.begin(topology, state_table(config.model, config.train.precision))
        with controlling(journal.report, desk=desk) as control:
            boot = WorkerBoot(
                config.model_dump(mode="json"), topology.to_json(), 1, 0, 1, control.address,
                mover.socket, str(folder / "run"), str(make(config.data).folder), None, 0, "cpu",
                "", heartbeat_seconds=0.05, orders=True,
            )  # fmt: skip
            run = Run(config, folder / "ranks", boot, mover, control, desk, journal, processes)
            with _scripted(run, script):
                arguments = {
                    "boot": boot.to_json(), "secret": mover.secret.hex(), "deeds": deeds or {},
                }  # fmt: skip
                codes = rank_values(
                    _work, processes, arguments, deadline=120, folder=run.folder,
                    dies=dict.fromkeys(dies, "SIGKILL"),
                )  # fmt: skip
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
    config: RunConfig
    losses: dict[int, float]
    fed: list[tuple[int, int]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """One worker, from the first step to the last."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        config = _config(folder)
        journal = _run(folder / "alone", config, place(Layout(), 1, _nodes(1)), patch)
    losses = journal.losses()
    assert sorted(losses) == list(range(1, STEPS + 1))
    return Undisturbed(config, losses, journal.fed())


def _three(generation: int = 1) -> Topology:
    return place(Layout(dp_replicate=3), generation, _nodes(3))


def _two(generation: int) -> Topology:
    return place(Layout(dp_replicate=2), generation, _nodes(2))


def test_survivors_hold_and_go_on_without_the_lost_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Undisturbed
) -> None:
    def script(run: Run) -> None:
        held = run.wait_held([0, 2], 1)
        assert {(h["kind"], h["applied"], h["torn"]) for h in held} == {("peer", FAULT - 1, False)}
        assert [h["state"] for h in held] == [[1, 0], [1, 2]]
        run.begin(_two(2), [2, 0], FAULT - 1, came_from=[2, 0], before=_three())

    journal = _run(
        tmp_path / "run", whole.config, _three(), monkeypatch, script,
        deeds={"die": [1, 1, FAULT]}, dies=[1],
    )  # fmt: skip
    assert journal.losses() == whole.losses
    assert journal.fed() == whole.fed


@pytest.mark.parametrize("deed", ["raise", "tear"])
def test_an_exception_in_a_step_ends_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Undisturbed, deed: str
) -> None:
    """In the midst of an update it costs the process its state, which the others send it."""
    torn = deed == "tear"
    step = FAULT if torn else FAULT - 1

    def script(run: Run) -> None:
        held = run.wait_held([1], 1)[0]
        assert (held["kind"], held["applied"], held["torn"]) == ("error", FAULT - 1, torn)
        assert held["text"] == "MemoryError: the test took all of it"
        run.halt([0, 1, 2], 1)
        others = run.wait_held([0, 2], 1)
        assert {(h["applied"], h["torn"]) for h in others} == {(step, False)}
        came_from = [0, None if torn else 1, 2]
        run.begin(_three(2), [0, 1, 2], step, came_from=came_from, before=_three())

    journal = _run(
        tmp_path / "run", whole.config, _three(), monkeypatch, script,
        deeds={deed: [1, 1, FAULT]},
    )  # fmt: skip
    assert journal.losses() == whole.losses
    assert journal.fed() == whole.fed


def test_a_standby_takes_a_lost_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Undisturbed
) -> None:
    def script(run: Run) -> None:
        run.wait_held([0, 2], 1)
        wait_until(lambda: run.pid(3) in run.desk.asked, SECONDS, "the standby to be ready")
        run.begin(_three(2), [0, 3, 2], FAULT - 1, came_from=[0, None, 2], before=_three())
        run.desk.give(run.pid(4), {"kind": "end"})

    journal = _run(
        tmp_path / "run", whole.config, _three(), monkeypatch, script, standbys=2,
        deeds={"die": [1, 1, FAULT]}, dies=[1],
    )  # fmt: skip
    assert journal.losses() == whole.losses
    assert journal.fed() == whole.fed


def test_who_waits_for_one_that_hangs_is_woken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Undisturbed
) -> None:
    def script(run: Run) -> None:
        wait_until((run.folder / "still.1.mark").exists, SECONDS, "the one that hangs")
        run.halt([0, 2], 1)
        held = run.wait_held([0, 2], 1)
        assert {(h["kind"], h["applied"], h["torn"]) for h in held} == {("halt", FAULT - 1, False)}
        run.kill(1)
        run.begin(_two(2), [0, 2], FAULT - 1, came_from=[0, 2], before=_three())

    journal = _run(
        tmp_path / "run", whole.config, _three(), monkeypatch, script,
        deeds={"stand still": [1, 1, FAULT]}, dies=[1],
    )  # fmt: skip
    assert journal.losses() == whole.losses
    assert journal.fed() == whole.fed


def test_a_loss_while_the_next_generation_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Undisturbed
) -> None:
    """Nothing has moved yet, so who is left still holds its state: that of generation 1."""

    def script(run: Run) -> None:
        run.wait_held([0, 2], 1)
        run.begin(_two(2), [0, 2], FAULT - 1, came_from=[0, 2], before=_three())
        wait_until(lambda: not _alive(run.pid(2)), SECONDS, "the second loss")
        run.halt([0], 2)
        held = run.wait_held([0], 2)[0]
        assert (held["kind"], held["applied"], held["torn"]) == ("halt", FAULT - 1, False)
        assert held["state"] == [1, 0]
        alone = place(Layout(), 3, _nodes(1))
        run.begin(alone, [0], FAULT - 1, came_from=[0], before=_three())

    journal = _run(
        tmp_path / "run", whole.config, _three(), monkeypatch, script,
        deeds={"die": [1, 1, FAULT], "die while joining": [2, 2, 0]}, dies=[1, 2],
    )  # fmt: skip
    assert journal.losses() == whole.losses
    assert journal.fed() == whole.fed


def test_one_that_stands_still_while_the_next_generation_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Undisturbed
) -> None:
    """It has met the others, and they wait for what it says: they are woken all the same."""

    def script(run: Run) -> None:
        run.wait_held([0, 2], 1)
        run.begin(_two(2), [0, 2], FAULT - 1, came_from=[0, 2], before=_three())
        wait_until(lambda: _state(run.pid(2)) == "T", SECONDS, "the one that stands still")
        run.halt([0], 2)
        held = run.wait_held([0], 2)[0]
        run.kill(2)
        assert (held["kind"], held["applied"], held["torn"]) == ("halt", FAULT - 1, False)
        alone = place(Layout(), 3, _nodes(1))
        run.begin(alone, [0], FAULT - 1, came_from=[0], before=_three())

    journal = _run(
        tmp_path / "run", whole.config, _three(), monkeypatch, script,
        deeds={"die": [1, 1, FAULT], "stand still while joining": [2, 2, 0]}, dies=[1, 2],
    )  # fmt: skip
    assert journal.losses() == whole.losses
    assert journal.fed() == whole.fed


def test_a_pause_loses_nothing_and_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Undisturbed
) -> None:
    """From two replicas to one of two shards, and a halt that comes too late changes nothing."""

    def script(run: Run) -> None:
        wait_until(lambda: FAULT - 1 in run.journal.losses(), SECONDS, "the steps before")
        run.journal.pause = 1
        held = run.wait_held([0, 1], 1)
        step = held[0]["applied"]
        assert FAULT <= step < STEPS
        assert [(h["kind"], h["applied"], h["torn"]) for h in held] == [("paused", step, False)] * 2
        assert not run.mover.store.list("checkpoints/")
        run.halt([0, 1], 1)
        after = place(Layout(dp_shard=2), 2, _nodes(2))
        run.begin(after, [1, 0], step, came_from=[1, 0], before=_two(1))

    journal = _run(
        tmp_path / "run", whole.config, _two(1), monkeypatch, script,
        deeds={"wait for a pause": [1, 0, FAULT]},
    )  # fmt: skip
    losses = journal.losses()
    assert losses == pytest.approx(whole.losses, rel=1e-10)
    assert journal.fed() == whole.fed


def test_what_was_lost_with_a_shard_is_read_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Undisturbed
) -> None:
    """The survivor begins anew in the same process, on its own."""
    config = whole.config.model_copy(
        update={"checkpoint": whole.config.checkpoint.model_copy(update={"memory_every_steps": 1})}
    )

    def script(run: Run) -> None:
        (held,) = run.wait_held([0], 1)
        assert (held["kind"], held["torn"]) == ("peer", False)
        alone = place(Layout(), 2, _nodes(1))
        run.mover.client(1).drain(10.0, durable=False)
        client = run.mover.begin(alone, state_table(config.model, config.train.precision))
        newest = client.newest()
        assert 0 < newest.step < FAULT
        assert not newest.durable
        run.begin(alone, [0], newest.step, restore=newest.key, opened=True)

    journal = _run(
        tmp_path / "run", config, place(Layout(dp_shard=2), 1, _nodes(2)), monkeypatch, script,
        deeds={"die": [1, 1, FAULT]}, dies=[1],
    )  # fmt: skip
    losses = journal.losses()
    assert losses == pytest.approx(whole.losses, rel=1e-10)
    assert journal.fed() == whole.fed


def test_what_lies_inside_a_whole_replica_outlives_the_loss_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Undisturbed
) -> None:
    """Its ranks compute in lockstep, and are woken between the replicas only."""
    layout = Layout(dp_replicate=2, dp_shard=2)

    def script(run: Run) -> None:
        run.wait_held([2], 1)
        run.halt([0, 1], 1, inside=False)
        held = run.wait_held([0, 1], 1)
        assert {(h["applied"], h["torn"]) for h in held} == {(FAULT - 1, False)}
        after = place(Layout(dp_shard=2), 2, _nodes(2))
        before = place(layout, 1, _nodes(4))
        run.begin(after, [0, 1], FAULT - 1, came_from=[0, 1], before=before)
        run.desk.give(run.pid(2), {"kind": "end"})

    journal = _run(
        tmp_path / "run", whole.config, place(layout, 1, _nodes(4)), monkeypatch, script,
        deeds={"die": [1, 3, FAULT]}, dies=[3],
    )  # fmt: skip
    said = (tmp_path / "run" / "ranks" / "rank0.log").read_text()
    assert "goes on from step" in said
    assert "build" not in said
    assert journal.losses() == pytest.approx(whole.losses, rel=1e-10)
    assert journal.fed() == whole.fed


def test_a_loss_in_the_last_step_leaves_a_checkpoint_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Undisturbed
) -> None:
    def script(run: Run) -> None:
        held = run.wait_held([0, 2], 1)
        assert {(h["applied"], h["torn"]) for h in held} == {(STEPS, False)}
        run.begin(_two(2), [0, 2], STEPS, came_from=[0, 2], before=_three())

    journal = _run(
        tmp_path / "run", whole.config, _three(), monkeypatch, script,
        deeds={"die in the update": [1, 1, STEPS]}, dies=[1],
    )  # fmt: skip
    assert journal.losses() == whole.losses
    assert journal.fed() == whole.fed
    newest = newest_verified(FolderStore(tmp_path / "run" / "run"), lambda *_: None)
    assert newest is not None
    assert (newest.commit.step, newest.commit.generation) == (STEPS, 2)


def test_what_is_not_finite_or_rotten_is_said_and_ends_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Undisturbed
) -> None:
    def script(run: Run) -> None:
        (held,) = run.wait_held([0], 1)
        assert (held["kind"], held["applied"], held["torn"]) == ("non_finite", FAULT - 1, False)
        run.mover.store.create("rotten", b"{")
        run.begin(place(Layout(), 2, _nodes(1)), [0], 2, restore="rotten")
        (held,) = run.wait_held([0], 2)
        assert (held["kind"], held["torn"], held["state"]) == ("rotten", True, None)
        assert "rotten" in held["text"]
        run.begin(place(Layout(), 3, _nodes(1)), [0], 0)

    journal = _run(
        tmp_path / "run", whole.config, place(Layout(), 1, _nodes(1)), monkeypatch, script,
        deeds={"not finite": [1, 0, FAULT]},
    )  # fmt: skip
    assert journal.losses() == whole.losses
    assert journal.fed() == whole.fed


def _alive(process: int) -> bool:
    return _state(process) not in "ZX"


def _state(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"

"""Captures that hide, in the real loop over real ranks: parameters and moments do not change
between an update and the vote of the next step, under any layout, so the copy has until then.

The copying thread is held up until the fence or runs as it likes. In both cases what lies in the
arena is, bit by bit, a clone that was taken right after the update.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch

from holdfast.checkpoint.capture.capturer import Capturer
from holdfast.checkpoint.mover.client import MoverClient
from holdfast.config.run import RunConfig
from holdfast.core.sharding.state_table import state_table
from holdfast.elastic.worker.checkpointer import SnapshotSaver
from holdfast.elastic.worker.reporter import AgentReporter
from holdfast.errors import PeerLostError
from holdfast.events import CheckpointCaptured, CheckpointSkipped, Event
from holdfast.training.engine.engine import StepEngine
from holdfast.training.engine.evaluate import Evaluator
from holdfast.training.engine.runner import TrainingLoop
from holdfast.training.engine.state import LocalTensor
from holdfast.training.engine.vote import Wishes
from holdfast.wire.secret import Secret
from tests.support.layouts import VOCABULARY, case, config_of, engine_of, topology_of
from tests.support.marks import in_campaign
from tests.support.mover_process import Mover
from tests.support.ranks import RankContext, rank_values
from tests.support.tiny_training import Fed, feed

STEPS = 8
CHANGES = {"train__steps": STEPS, "checkpoint__every_steps": 1}


@dataclass
class Batch:
    step: int
    microbatches: Sequence[Fed]
    entries: list[dict[str, Any]]


def feeder(engine: StepEngine, lost_at: int = 0) -> Iterator[Batch]:
    shard, shards = engine.groups.coordinate.dp_shard, engine.groups.degree("dp_shard")
    for step in range(1, STEPS + 1):
        if step == lost_at:
            raise PeerLostError("a peer was lost while the batch was made")
        mine = [feed(step, leaf, 4, shard, shards, VOCABULARY) for leaf in engine.plan.share(step)]
        yield Batch(step, mine, [])


class World:
    """Membership, reporter (each call at once) and evaluator of a rank."""

    is_fenced = False

    def __init__(self) -> None:
        self.events: list[Event] = []

    def requests(self, step: int) -> Wishes:
        return Wishes()

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def progress(self, step: int, phase: str) -> None: ...

    def emit_lazily(self, event: Event) -> None:
        self.emit(event)

    def expect_callback(self) -> None: ...

    def call_when_durable(self, call: Callable[[], None]) -> None:
        call()

    def flush(self, deadline: float) -> bool:
        return True

    def run(self, alive: Callable[[], None]) -> None: ...


class Cloning(SnapshotSaver):
    """Compares at each fence what is in the arena with what was there right after the update."""

    def __init__(self, capturer: Capturer, world: World, rank: int, config: RunConfig) -> None:
        super().__init__(capturer, cast(AgentReporter, world), rank, config)
        self._arena, self._made = capturer._arena, capturer
        self._open: tuple[int, dict[str, torch.Tensor]] | None = None
        self.checked: list[int] = []
        self.hold: threading.Event | None = None
        self.full: Sequence[int] = ()
        self._votes = 0

    def has_free_slot(self) -> bool:
        self._votes += 1
        return self._votes not in self.full and super().has_free_slot()

    def capture(self, step: int, state: Sequence[LocalTensor], wait: float, durable: bool) -> bool:
        if self.hold is not None:
            self.hold = threading.Event()
            self._made._copy_threads.submit(self.hold.wait, 20.0)
        found = super().capture(step, state, wait, durable)
        if found:
            self._open = step, {local.name: local.tensor.clone() for local in state}
        return found

    def fence(self) -> float:
        seconds = super().fence()
        if self.hold is not None:
            self.hold.set()
        if self._open is not None:
            self._compare(*self._open)
            self._open = None
        return seconds

    def close(self) -> None:
        self.fence()
        super().close()

    def _compare(self, step: int, clones: dict[str, torch.Tensor]) -> None:
        headers = [self._arena.header(slot) for slot in range(self._arena.slots)]
        slot = next(n for n, header in enumerate(headers) if header and header.step == step)
        start = self._arena.data_offset(slot) + len(self._made._header)
        for p in self._made._copy_plan._placed:
            held = self._made._copy_plan._held[p.box.name]
            rows = p.box.offsets[0] - held.offsets[0] if p.box.offsets else 0
            part = clones[p.box.name]
            part = part[rows : rows + p.box.lengths[0]] if p.box.lengths else part
            at = start + p.start
            assert (
                self._arena.memory[at : at + p.nbytes]
                == part.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            ), (step, p.box)
        self.checked.append(step)


def loop(
    rank: RankContext,
    name: str,
    socket: str,
    secret: str,
    held: bool = False,
    lost_at: int = 0,
    full: Sequence[int] = (),
    changes: dict[str, Any] | None = None,
) -> dict[str, Any]:
    of = case(name)
    config = config_of(of.changes | CHANGES | (changes or {}))
    topology = topology_of(of, config)
    engine = engine_of(config, topology, rank.rank, rank.store())
    client = MoverClient(socket, Secret(bytes.fromhex(secret)), 1)
    table = state_table(config.model, config.train.precision)
    tensors = {local.name: local.tensor for local in engine.state()}
    world = World()
    capturer = Capturer(client, topology, table, rank.rank, tensors, run="test")
    saver = Cloning(capturer, world, rank.rank, config)
    saver.hold = threading.Event() if held else None
    saver.full = full if rank.rank == 1 else ()
    unsaved: str | None = "lost"
    try:
        unsaved = (
            TrainingLoop(
                engine,
                world,
                world,
                saver,
                cast(Evaluator, world),
                config,
                start_step=0,
                settle_seconds=60,
            )
            .run(feeder(engine, lost_at))
            .unsaved_reason
        )
    except PeerLostError:
        pass
    finally:
        saver.close()
    settled = capturer.wait_until_committed(lost_at - 1, 60) if lost_at else unsaved
    captured = [e for e in world.events if isinstance(e, CheckpointCaptured)]
    engine.close()
    return {
        "settled": settled,
        "checked": saver.checked,
        "captured": [e.step for e in captured],
        "durable": [e.step for e in captured if e.durable],
        "fences": [e.fence_seconds > 0 for e in captured],
        "sums": all(e.seconds >= e.fence_seconds for e in captured),
        "skipped": [
            [e.step, e.rank, e.reason] for e in world.events if isinstance(e, CheckpointSkipped)
        ],
    }


@pytest.fixture
def settings(tmp_path: Any) -> Iterator[Callable[[str], dict[str, Any]]]:
    movers: list[Mover] = []

    def begin(name: str) -> dict[str, Any]:
        of = case(name)
        config = config_of(of.changes | CHANGES)
        movers.append(Mover(tmp_path / "run"))
        table = state_table(config.model, config.train.precision)
        movers[-1].begin(topology_of(of, config), table)
        return {"name": name, "socket": movers[-1].socket, "secret": movers[-1].secret.hex()}

    (tmp_path / "run").mkdir()
    yield begin
    for mover in movers:
        mover.close()


Settings = Callable[[str], dict[str, Any]]


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("fp32.zero1.2", True),
        in_campaign("bf16.shard2", True),
        in_campaign("tp2", True),
        ("pp2", False),
        in_campaign("dp2", False),
    ],
)
def test_what_is_captured_is_the_state_right_after_the_update(
    settings: Settings, name: str, held: bool
) -> None:
    for found in rank_values(loop, 2, settings(name) | {"held": held}):
        assert found["settled"] is None
        assert found["captured"] == found["checked"]
        assert found["captured"][-1] == STEPS
        assert len(found["captured"]) >= 2
        assert found["sums"]
        if held:
            assert all(found["fences"])


def test_without_hiding_training_waits_for_the_copy(settings: Settings) -> None:
    for found in rank_values(loop, 2, settings("dp2") | {"changes": {"checkpoint__hidden": False}}):
        assert found["settled"] is None
        assert found["checked"] == found["captured"]
        assert all(found["fences"])


def test_a_rank_without_room_keeps_all_from_capturing(settings: Settings) -> None:
    """Rank 1 says so with every vote after the first capture; the last one waits instead."""
    first, second = rank_values(loop, 2, settings("dp2") | {"full": [*range(2, STEPS + 1)]})
    assert first["captured"] == second["captured"] == [1, STEPS]
    assert first["settled"] is second["settled"] is None
    assert [step for step, _, _ in first["skipped"]] == list(range(2, STEPS))
    assert all(
        "has not ended: the disk is busy, or another" in reason for _, _, reason in first["skipped"]
    )
    assert second["skipped"] == []


def test_a_save_that_found_no_room_is_made_with_the_next_snapshot_in_memory(
    settings: Settings,
) -> None:
    arguments = settings("dp2") | {
        "full": [4],
        "changes": {"checkpoint__every_steps": 4, "checkpoint__memory_every_steps": 1},
    }
    first, second = rank_values(loop, 2, arguments)
    assert first["captured"] == second["captured"] == first["checked"] == second["checked"]
    assert [step for step, _, _ in first["skipped"]] == [4]
    owed = min(step for step in first["captured"] if step > 4)
    assert first["durable"] == second["durable"] == sorted({owed, STEPS})
    assert first["captured"][0] == 1
    assert first["settled"] is second["settled"] is None


def test_the_snapshot_of_a_complete_step_is_saved_though_the_next_one_failed(
    settings: Settings,
) -> None:
    for found in rank_values(loop, 2, settings("dp2") | {"held": True, "lost_at": 2}):
        assert found["captured"] == [1]
        assert found["settled"] is None

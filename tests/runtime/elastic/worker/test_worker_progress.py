"""A worker's checkpoints: what it reports while it waits, its arena, and a restore whose source
fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from holdfast.checkpoint.capture.capturer import Capturer, SkippedCapture
from holdfast.checkpoint.capture.reconnecting_capturer import ReconnectingCapturer
from holdfast.checkpoint.mover.client import MoverGoneError
from holdfast.checkpoint.peers.client import PeerError
from holdfast.checkpoint.save.single_writer import TensorSource, write_single
from holdfast.config.loading.load import load_config
from holdfast.config.sections.checkpoint import CheckpointConfig
from holdfast.core.sharding.boxes import Box
from holdfast.elastic.protocol.worker_spec import WorkerSpec
from holdfast.elastic.worker import checkpointer
from holdfast.elastic.worker.checkpointer import (
    SnapshotSaver,
    make_with_fewer_slots,
    retry_until_mover_is_up,
    wait_until_announced,
)
from holdfast.elastic.worker.reporter import AgentReporter
from holdfast.elastic.worker.restore import CorruptCheckpointError, _load_with_retry, restore
from holdfast.errors import FencedError, HoldfastError, StoreError
from holdfast.events import CheckpointRestored, CheckpointSkipped, Event
from holdfast.training.engine.build import TrainingSession
from holdfast.wire.store.run_store import FolderStore


class Heard:
    """A reporter whose first `deaf` flushes are in vain."""

    def __init__(self, deaf: int = 0, fenced: bool = False) -> None:
        self.deaf, self.is_fenced = deaf, fenced
        self.said: list[tuple[int, str]] = []
        self.events: list[Event] = []

    def progress(self, step: int, phase: str) -> None:
        self.said.append((step, phase))

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def flush(self, deadline: float) -> bool:
        self.deaf -= 1
        return self.deaf < 0


class SlowCapturer:
    def fence(self) -> float:
        return 0.0

    def wait_until_committed(
        self, step: int, timeout: float, alive: Callable[[], None]
    ) -> str | None:
        assert 0 < timeout <= 100
        for _ in range(3):
            alive()
        return None


def _saver(
    heard: Heard, capturer: SlowCapturer | ReconnectingCapturer | None = None
) -> SnapshotSaver:
    config = load_config(None, []).config
    made = cast(Capturer, capturer or SlowCapturer())
    return SnapshotSaver(made, cast(AgentReporter, heard), 0, config)


def test_who_waits_for_the_last_save_reports_progress() -> None:
    heard = Heard(deaf=4)
    assert _saver(heard).wait_until_committed(7, 100.0) is None
    assert heard.said == [(7, "save")] * 7


@pytest.mark.parametrize(("heard", "seconds"), [(Heard(1, True), 100.0), (Heard(1), 0.0)])
def test_a_ledger_that_cannot_be_stored_is_named(heard: Heard, seconds: float) -> None:
    assert _saver(heard).wait_until_committed(7, seconds) == "the journal could not be written"


class QuickCapturer(SlowCapturer):
    nbytes = 1

    def __init__(self) -> None:
        self.closed = False

    def has_free_slot(self) -> bool:
        return True

    def begin(self, step: int, wait: float) -> SkippedCapture:
        return SkippedCapture(step, "this one never can")

    def close(self) -> None:
        self.closed = True


def _in_the_making(make: Callable[[], QuickCapturer]) -> ReconnectingCapturer:
    made = cast(Callable[[], Capturer], make)
    return ReconnectingCapturer(made, made, lambda skipped: None, in_background=True)


def test_an_arena_in_the_making_has_no_room_and_is_waited_for_at_the_end() -> None:
    go, capturer, heard = threading.Event(), QuickCapturer(), Heard()

    def make() -> QuickCapturer:
        go.wait(120)
        return capturer

    def skipped() -> list[tuple[int, str]]:
        return [(e.step, e.reason) for e in heard.events if isinstance(e, CheckpointSkipped)]

    saver = _saver(heard, _in_the_making(make))
    assert saver.fence() == 0.0
    assert not saver.capture(3, [], 0.0, True)
    assert skipped() == [(3, "the mover has made no arena yet")]
    assert saver.wait_until_committed(3, 60.0) == "the mover has made no arena"
    assert saver.wait_until_committed(3, 60.0, durable=False) is None
    heard.deaf, heard.is_fenced = 2, True
    assert saver.wait_until_committed(3, 60.0, durable=False) == "the journal could not be written"
    go.set()
    assert not saver.capture(4, [], 60.0, True)
    assert skipped()[1:] == [(4, "this one never can")]
    assert saver.has_free_slot()
    saver.close()
    assert capturer.closed


def test_an_arena_that_comes_while_the_saver_closes_is_given_back() -> None:
    go, capturer = threading.Event(), QuickCapturer()

    def make() -> QuickCapturer:
        go.wait(120)
        return capturer

    saver = _saver(Heard(), _in_the_making(make))
    threading.Timer(0.05, go.set).start()
    saver.close()
    assert capturer.closed


def test_what_an_arena_in_the_making_fails_with_is_raised_where_room_is_asked_for() -> None:
    def fails() -> QuickCapturer:
        raise FencedError("over")

    saver = _saver(Heard(), _in_the_making(fails))
    with pytest.raises(FencedError):
        saver.has_free_slot()
    with pytest.raises(FencedError):
        saver.capture(1, [], 60.0, True)
    assert saver.fence() == 0.0
    saver.close()


def test_who_restores_reports_progress_tensor_by_tensor(tmp_path: Path) -> None:
    names = ("model.a", "model.b", "model.c")
    sources = [TensorSource(name, "F32", (2,), [b"\0" * 8]) for name in names]
    commit = write_single(FolderStore(tmp_path), 1, 5, sources, {})
    boot = WorkerSpec({}, None, 2, 0, 1, "h:1", "", str(tmp_path), "", commit.key, 5, "cpu", "")

    class Engine:
        def load(self, read: Callable[[Box, Tensor], None]) -> None:
            for name in names:
                read(Box(name, (0,), (2,)), torch.ones(2))

    class Built:
        engine = Engine()

    heard = Heard()
    restore(boot, cast(TrainingSession, Built()), cast(AgentReporter, heard), None)
    assert heard.said == [(5, "restore")] * 3
    (event,) = heard.events
    assert isinstance(event, CheckpointRestored)
    assert event.step == 5


def _asked(rules: CheckpointConfig, error: HoldfastError | None = None) -> tuple[list[int], int]:
    """The numbers of slots that were tried, and how many settings were said to be ignored."""
    tried: list[int] = []
    said: list[str] = []

    def make(slots: int) -> int:
        tried.append(slots)
        if error is not None and slots == 3:
            raise error
        return slots

    make_with_fewer_slots(make, rules, lambda key, reason: said.append(f"{key}: {reason}"))
    assert all(text.startswith("checkpoint.slots: ") for text in said)
    return tried, len(said)


def test_three_where_memory_gets_what_the_disk_does_not() -> None:
    assert _asked(CheckpointConfig(memory_every_steps=1)) == ([3], 0)
    assert _asked(CheckpointConfig(memory_every_steps="auto")) == ([3], 0)
    assert _asked(CheckpointConfig(memory_every_steps=0)) == ([2], 0)
    assert _asked(CheckpointConfig(memory_every_steps=1, slots=2)) == ([2], 0)


def test_two_where_there_is_no_room_for_three_unless_somebody_asked_for_them() -> None:
    full = HoldfastError("no memory for an arena")
    assert _asked(CheckpointConfig(memory_every_steps=1), full) == ([3, 2], 1)
    with pytest.raises(HoldfastError, match="no memory"):
        _asked(CheckpointConfig(memory_every_steps=1, slots=3), full)
    with pytest.raises(FencedError):
        _asked(CheckpointConfig(memory_every_steps=1), FencedError("generation 2 has begun"))


def test_a_mover_that_is_being_replaced_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def make() -> str:
        if len(asked) < 3:
            raise MoverGoneError("it does not answer")
        return "an arena"

    assert retry_until_mover_is_up(make, asked.append) == "an arena"
    assert len(asked) == 3

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    asked.clear()
    with pytest.raises(KeyboardInterrupt):
        retry_until_mover_is_up(make, interrupted)
    monkeypatch.setattr(checkpointer, "_MOVER_RETURN_TIMEOUT_S", 0.0)
    with pytest.raises(MoverGoneError):
        retry_until_mover_is_up(make, asked.append)
    assert asked == []


def test_an_announcement_is_waited_for_until_a_halt() -> None:
    """The mover's disk may hang before the mover knows of the generation."""
    known, waited = [1, 1, 1, 2], list[float]()
    wait_until_announced(lambda: {"generation": known.pop(0)}, 2, waited.append)
    assert waited == [0.005, 0.01, 0.02]
    wait_until_announced(lambda: {"generation": 3}, 2, waited.append)

    def halted(seconds: float) -> None:
        raise HoldfastError("the generation has ended")

    with pytest.raises(HoldfastError, match="has ended"):
        wait_until_announced(lambda: {"generation": 1}, 2, halted)


def load(folder: Path, *ends: HoldfastError | None) -> int:
    """Load with an engine whose reads end so, one after the other; how often it was asked."""
    left = list(ends)

    def once(boxes: object) -> None:
        if (end := left.pop(0)) is not None:
            raise end

    session: Any = SimpleNamespace(engine=SimpleNamespace(load=once))
    _load_with_retry(session, cast(Any, None), str(folder))
    return len(ends) - len(left)


def test_a_source_that_fails_once_is_asked_again(tmp_path: Path) -> None:
    assert load(tmp_path, None) == 1
    assert load(tmp_path, PeerError("it broke off"), None) == 2
    assert load(tmp_path, StoreError("it broke off"), None) == 2


def test_what_a_failing_peer_alone_holds_is_given_up(tmp_path: Path) -> None:
    """The next older state is begun from, rather than this one tried until the run gives up."""
    with pytest.raises(CorruptCheckpointError, match=r"cannot be read: 10\.0\.0\.7 broke off"):
        load(tmp_path, PeerError("10.0.0.7 broke off"), PeerError("10.0.0.7 broke off"))
    with pytest.raises(CorruptCheckpointError, match="it cannot be read"):
        load(tmp_path, StoreError("away"), PeerError("10.0.0.7 broke off"))

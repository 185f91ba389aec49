"""Training where there is no memory for snapshots."""

from __future__ import annotations

import errno
from contextlib import closing

import pytest

from holdfast.checkpoint.capture.no_room_capturer import ROOM_CHECK_INTERVAL_S, NoRoomCapturer
from holdfast.checkpoint.capture.reconnecting_capturer import ReconnectingCapturer
from holdfast.checkpoint.memory.arena import Arena
from holdfast.checkpoint.mover.protocol import error_from_json, error_to_json
from holdfast.elastic.worker.checkpointer import make_unless_no_room
from holdfast.errors import HoldfastError, NoRoomError
from holdfast.events import GenerationStarted, Record, SettingIgnored
from holdfast.machine import limits
from holdfast.report.history.progress import RunProgress
from tests.support.ranks import wait_until


def test_an_arena_without_room_is_told_over_the_movers_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "available_memory", lambda: 1 << 16)
    with pytest.raises(NoRoomError, match="no memory for an arena") as found:
        Arena.create("a", 2, 1 << 20)
    assert isinstance(error_from_json(error_to_json(found.value)), NoRoomError)


@pytest.mark.parametrize(
    "error", [NoRoomError("no memory for an arena"), MemoryError(), OSError(errno.ENOMEM, "no")]
)
def test_training_continues_without_snapshots_and_says_so(error: Exception) -> None:
    def make() -> object:
        raise error

    said: list[str] = []
    capturer = make_unless_no_room(make, lambda key, reason: said.append(f"{key}: {reason}"))
    assert isinstance(capturer, NoRoomCapturer)
    assert not capturer.has_free_slot()
    assert capturer.begin(3).step == 3
    (sentence,) = said
    assert "training continues without snapshots" in sentence


def test_another_fault_is_no_lack_of_room() -> None:
    def make() -> object:
        raise HoldfastError("fenced")

    with pytest.raises(HoldfastError, match="fenced"):
        make_unless_no_room(make, pytest.fail)


def test_once_there_is_room_an_arena_takes_its_place() -> None:
    now = [0.0]
    none = NoRoomCapturer("no memory", lambda: now[0])

    class Roomy(NoRoomCapturer):
        def has_free_slot(self) -> bool:
            return True

    made: list[Roomy] = []

    def make() -> Roomy:
        made.append(Roomy("has room", lambda: 0.0))
        return made[-1]

    with closing(ReconnectingCapturer(lambda: none, make, pytest.fail)) as capturer:
        assert not capturer.has_free_slot()
        now[0] = ROOM_CHECK_INTERVAL_S
        wait_until(capturer.has_free_slot, what="an arena")
        assert len(made) == 1


def test_every_rank_reports_it_and_the_user_reads_it_once() -> None:
    progress = RunProgress(10)
    start = GenerationStarted({"nodes": ["a", "a"]}, "start")
    progress.observe(Record(1, "agent", 0, 1.0, start))
    lines = [
        line.text
        for rank in (0, 1)
        for line in progress.observe(
            Record(1, f"rank{rank}", 0, 2.0, SettingIgnored("checkpoint", f"{rank} bytes left"))
        )
    ]
    assert lines == ["checkpoint is not honoured here: 0 bytes left"]

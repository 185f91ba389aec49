"""How a worker comes by its arena: how many snapshots it holds, and a mover that comes back."""

from __future__ import annotations

import pytest

from holdfast.checkpoint.mover.client import MoverGoneError
from holdfast.config.sections.checkpoint import CheckpointConfig
from holdfast.elastic.worker import checkpointer
from holdfast.elastic.worker.checkpointer import (
    make_with_fewer_slots,
    retry_until_mover_is_up,
    wait_until_announced,
)
from holdfast.errors import FencedError, HoldfastError


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

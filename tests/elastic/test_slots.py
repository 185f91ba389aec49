"""How many snapshots a worker's arena is asked to hold."""

from __future__ import annotations

import pytest

from holdfast.config.checkpoint import CheckpointConfig
from holdfast.elastic.worker.saver import where_there_is_room
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

    where_there_is_room(make, rules, lambda key, reason: said.append(f"{key}: {reason}"))
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

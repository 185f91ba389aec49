"""Stages that wait instead of computing: the one fake allowed for parallel speed.

If several ranks share a few cores, real arithmetic measures the operating system's scheduler. A
waiting stage takes a given time per action, and exchanges real tensors of a given size between real
processes. So it shows what a schedule does on devices that do not disturb each other. That is its
bubble, and the work behind which its transfers hide.

A wait ends at a moment fixed when it begins. No process wakes exactly then, and the delays would
add up over a row of actions without a pause. So the next action counts from the moment at which the
last one should have ended. (An accelerator with queued work behaves so: its host may be late, the
device continues.)
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from holdfast.core.schedule.table import ActionKind

_PAUSE = 0.0005  # seconds; an action that begins later than this had something to wait for


class WaitingStages:
    """The stages of one rank (`StageWork`, with an undivided or a split backward) that wait.

    seconds: how long each action of (stage, kind) takes.
    nbytes: of every activation, and of every gradient, between two stages.
    """

    def __init__(self, stages: int, seconds: Mapping[tuple[int, ActionKind], float], nbytes: int):
        self._last, self._seconds = stages - 1, dict(seconds)
        self._out = torch.zeros(nbytes, dtype=torch.uint8)
        self._until = self._left = 0.0

    def boundary(self, stage: int, microbatch: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Bytes."""
        return tuple(self._out.shape), self._out.dtype

    def forward(self, stage: int, microbatch: int, incoming: Tensor | None) -> Tensor | None:
        """Wait, and give what the next stage takes."""
        self._wait(stage, ActionKind.FORWARD)
        return self._out if stage < self._last else None

    def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """Wait, and give what the stage before takes."""
        self._wait(stage, ActionKind.BACKWARD)
        return self._out if stage > 0 else None

    def backward_input(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """Wait, and give what the stage before takes."""
        self._wait(stage, ActionKind.BACKWARD_INPUT)
        return self._out if stage > 0 else None

    def backward_weight(self, stage: int, microbatch: int) -> None:
        """Wait."""
        self._wait(stage, ActionKind.BACKWARD_WEIGHT)

    def _wait(self, stage: int, kind: ActionKind) -> None:
        now = time.monotonic()
        begin = self._until if now - self._left < _PAUSE else now
        self._until = begin + self._seconds[stage, kind]
        while (left := self._until - time.monotonic()) > 0:
            time.sleep(left)
        self._left = time.monotonic()

"""`/healthz` and `/metrics`: read-only, without a proof, on a listener of their own.

Every client that can reach it may read these two paths. Other paths and methods are refused and
counted. The metrics are rendered at most twice a second, however often they are requested.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from holdfast.policy.membership.transitions import Stage
from holdfast.wire.http.connection import Answer, Head
from holdfast.wire.http.connection_limits import Doors
from holdfast.wire.http.refusals import HEALTH, Refusals

RENDER_SECONDS = 0.5
"""Greatest age of a rendering: a stranger's many requests then cost the agent little."""


_STATES = {
    Stage.IDLE: "opening", Stage.BUILDING: "opening", Stage.WORKING: "training",
    Stage.BROKEN: "recovering", Stage.HELD: "recovering", Stage.DONE: "over",
}  # fmt: skip


def state(stage: Stage, stopping: bool) -> str:
    """Return one word for the state of the run on this node."""
    return "leaving" if stopping and stage is not Stage.DONE else _STATES[stage]


class Health:
    """The application of the listener; `health` and `render_metrics` answer from memory, within
    milliseconds."""

    def __init__(
        self, health: Callable[[], dict[str, Any]], render_metrics: Callable[[], bytes],
        refusals: Refusals | None = None,
    ) -> None:  # fmt: skip
        self.doors = Doors(HEALTH, refusals)
        self._health, self._render = health, render_metrics
        self._rendered: tuple[float, bytes] | None = None

    def admit(self, head: Head) -> Answer:
        path = head.target.partition(b"?")[0]
        if path not in (b"/healthz", b"/metrics") or head.method != b"GET":
            self.doors.refusals.count(HEALTH, "no such path")
            return Answer(405 if head.method != b"GET" else 404, close=True)
        if path == b"/metrics":
            kind = b"content-type: text/plain; version=0.0.4; charset=utf-8\r\n"
            return Answer(200, self._metrics(), kind)
        value = json.dumps(self._health(), separators=(",", ":")).encode()
        return Answer(200, value, b"content-type: application/json\r\n")

    def _metrics(self) -> bytes:
        now = time.monotonic()
        if self._rendered is None or now - self._rendered[0] > RENDER_SECONDS:
            self._rendered = now, self._render()
        return self._rendered[1]

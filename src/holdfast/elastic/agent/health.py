"""`/healthz` and `/metrics`: read-only, without a proof, on a listener of their own.

Every client that can reach it may read these two paths. Other paths and methods are refused and
counted. The metrics are rendered at most twice a second, however often they are requested.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from holdfast.policy.membership.transitions import NodeStage
from holdfast.wire.http.connection import HttpResponse, RequestHead
from holdfast.wire.http.connection_limits import ConnectionLimiter
from holdfast.wire.http.refusals import HEALTH, Refusals

METRICS_MAX_AGE_S = 0.5
"""Greatest age of a rendering: a stranger's many requests then cost the agent little."""


_STAGE_NAMES = {
    NodeStage.IDLE: "opening",
    NodeStage.BUILDING: "opening",
    NodeStage.WORKING: "training",
    NodeStage.BROKEN: "recovering",
    NodeStage.HELD: "recovering",
    NodeStage.DONE: "over",
}


def describe_state(stage: NodeStage, is_stopping: bool) -> str:
    """Return one word for the state of the run on this node."""
    return "leaving" if is_stopping and stage is not NodeStage.DONE else _STAGE_NAMES[stage]


class HealthApplication:
    """The application of the listener; `health_fields` and `render_metrics` answer from memory,
    within milliseconds."""

    def __init__(
        self,
        health_fields: Callable[[], dict[str, Any]],
        render_metrics: Callable[[], bytes],
        refusals: Refusals | None = None,
    ) -> None:
        self.limiter = ConnectionLimiter(HEALTH, refusals)
        self._health_fields, self._render_metrics = health_fields, render_metrics
        self._rendered_metrics: tuple[float, bytes] | None = None

    def admit(self, head: RequestHead) -> HttpResponse:
        path = head.target.partition(b"?")[0]
        if path not in (b"/healthz", b"/metrics") or head.method != b"GET":
            self.limiter.refusals.count(HEALTH, "no such path")
            return HttpResponse(405 if head.method != b"GET" else 404, close=True)
        if path == b"/metrics":
            kind = b"content-type: text/plain; version=0.0.4; charset=utf-8\r\n"
            return HttpResponse(200, self._metrics(), kind)
        value = json.dumps(self._health_fields(), separators=(",", ":")).encode()
        return HttpResponse(200, value, b"content-type: application/json\r\n")

    def _metrics(self) -> bytes:
        now = time.monotonic()
        if self._rendered_metrics is None or now - self._rendered_metrics[0] > METRICS_MAX_AGE_S:
            self._rendered_metrics = now, self._render_metrics()
        return self._rendered_metrics[1]

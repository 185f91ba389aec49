"""`/healthz` and `/metrics`: read-only, without a proof, on a listener of their own.

Every client that can reach it may read these two paths. Other paths and methods are refused and
counted. The metrics are rendered at most twice a second, however often they are requested.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core.json_parsing import JsonObject
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


@dataclass(frozen=True)
class HealthStatus:
    """The state of the run on this node, as `/healthz` answers it.

    role: of this agent in the term. committed_step: of the newest checkpoint. live_workers: on this
    node.
    """

    state: str
    term: int
    role: str
    generation: int
    step: int
    committed_step: int
    live_workers: int

    def to_json(self) -> JsonObject:
        return {
            "state": self.state,
            "term": self.term,
            "standing": self.role,
            "generation": self.generation,
            "step": self.step,
            "committed": self.committed_step,
            "workers": self.live_workers,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> HealthStatus:
        """Parse the answer. Raises KeyError, TypeError and ValueError if it is malformed."""
        return HealthStatus(
            str(value["state"]),
            int(value["term"]),
            str(value["standing"]),
            int(value["generation"]),
            int(value["step"]),
            int(value["committed"]),
            int(value["workers"]),
        )


class HealthApplication:
    """The application of the listener; `health_status` and `render_metrics` answer from memory,
    within milliseconds."""

    def __init__(
        self,
        health_status: Callable[[], HealthStatus],
        render_metrics: Callable[[], bytes],
        refusals: Refusals | None = None,
    ) -> None:
        self.limiter = ConnectionLimiter(HEALTH, refusals)
        self._health_status, self._render_metrics = health_status, render_metrics
        self._rendered_metrics: tuple[float, bytes] | None = None

    def admit(self, head: RequestHead) -> HttpResponse:
        path = head.target.partition(b"?")[0]
        if path not in (b"/healthz", b"/metrics") or head.method != b"GET":
            self.limiter.refusals.count(HEALTH, "no such path")
            return HttpResponse(405 if head.method != b"GET" else 404, close=True)
        if path == b"/metrics":
            kind = b"content-type: text/plain; version=0.0.4; charset=utf-8\r\n"
            return HttpResponse(200, self._metrics(), kind)
        value = json.dumps(self._health_status().to_json(), separators=(",", ":")).encode()
        return HttpResponse(200, value, b"content-type: application/json\r\n")

    def _metrics(self) -> bytes:
        now = time.monotonic()
        if self._rendered_metrics is None or now - self._rendered_metrics[0] > METRICS_MAX_AGE_S:
            self._rendered_metrics = now, self._render_metrics()
        return self._rendered_metrics[1]

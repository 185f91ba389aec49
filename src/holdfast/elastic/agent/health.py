"""`/healthz`, `/readyz` and `/metrics`: read-only, without a proof, on a listener of their own.

Every client that can reach it may read these three paths. Other paths and methods are refused and
counted. The metrics are rendered at most twice a second, however often they are requested.

`/healthz` answers 503 if the node trains and no step was done for a long time; an orchestrator may
then restart it. `/readyz` answers 200 only while the node trains. Both have the fields of
docs/reference/cli.md.
"""

from __future__ import annotations

import json
import math
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

from holdfast.core.json_parsing import JsonMessage, Key
from holdfast.policy.membership.transitions import NodeStage
from holdfast.wire.http.connection import HttpResponse, RequestHead
from holdfast.wire.http.connection_limits import ConnectionLimiter
from holdfast.wire.http.refusals import HEALTH, Refusals

METRICS_TYPE = b"content-type: text/plain; version=0.0.4; charset=utf-8\r\n"
"""Header of an answer to `/metrics`."""

METRICS_MAX_AGE_S = 0.5
"""Greatest age of a rendering: a stranger's many requests then cost the agent little."""

STALLED_AFTER_TIMEOUTS = 2.0
"""Multiples of `cluster.progress_seconds` without a step after which `/healthz` answers 503, and
the run counts as stuck. The agent itself replaces a worker without progress after one."""

MINORITY = "minority"
"""State of a node that misses the coordinator and reaches no majority."""

_STAGE_NAMES = {
    NodeStage.IDLE: "opening",
    NodeStage.BUILDING: "opening",
    NodeStage.WORKING: "training",
    NodeStage.BROKEN: "recovering",
    NodeStage.HELD: "recovering",
    NodeStage.DONE: "over",
}


def describe_state(
    stage: NodeStage,
    is_stopping: bool,
    is_save_waiting: bool = False,
    is_spare: bool = False,
    lacks_majority: bool = False,
) -> str:
    """Return one word for the state of the run on this node."""
    if lacks_majority and not is_stopping:
        return MINORITY
    if is_spare and not is_stopping:
        return "spare"
    if is_save_waiting and stage is NodeStage.WORKING and not is_stopping:
        return "saving"
    return "leaving" if is_stopping and stage is not NodeStage.DONE else _STAGE_NAMES[stage]


@dataclass(frozen=True)
class HealthStatus(JsonMessage):
    """The state of the run on this node, as `/healthz` answers it.

    role: of this agent in the term. committed_step: of the newest checkpoint. live_workers: on this
    node. world_size, nodes: workers and nodes of the generation that this node takes part in, 0
    outside one. seconds_at_step: since a request first saw this state, generation and step.
    """

    state: str
    term: int
    role: Annotated[str, Key("standing")]
    generation: int
    step: int
    committed_step: Annotated[int, Key("committed")]
    live_workers: Annotated[int, Key("workers")]
    world_size: int = 0
    nodes: int = 0
    seconds_at_step: float = 0.0


class HealthApplication:
    """The application of the listener; `health_status` and `render_metrics` answer from memory,
    within milliseconds."""

    def __init__(
        self,
        health_status: Callable[[], HealthStatus],
        render_metrics: Callable[[], bytes],
        refusals: Refusals | None = None,
        stalled_after_s: float = math.inf,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """stalled_after_s: seconds without a step after which a node that trains is not healthy,
        counted from the first request that saw the same step."""
        self.limiter = ConnectionLimiter(HEALTH, refusals)
        self.tls: ssl.SSLContext | None = None  # so that Prometheus can read it
        self._health_status, self._render_metrics = health_status, render_metrics
        self._rendered_metrics: tuple[float, bytes] | None = None
        self._stalled_after_s, self._now = stalled_after_s, now
        self._seen: tuple[Any, float] = (None, now())
        """State, generation and step of the last request, and when they were first seen."""

    def admit(self, head: RequestHead) -> HttpResponse:
        path = head.target.partition(b"?")[0]
        if path not in (b"/healthz", b"/readyz", b"/metrics") or head.method != b"GET":
            self.limiter.refusals.count(HEALTH, "no such path")
            return HttpResponse(405 if head.method != b"GET" else 404, close=True)
        if path == b"/metrics":
            return HttpResponse(200, self._metrics(), METRICS_TYPE)
        status = self._with_seconds_at_step(self._health_status())
        code = self._health_code(status) if path == b"/healthz" else _ready_code(status)
        value = json.dumps(status.to_json(), separators=(",", ":")).encode()
        return HttpResponse(code, value, b"content-type: application/json\r\n")

    def _with_seconds_at_step(self, status: HealthStatus) -> HealthStatus:
        """Add how long requests have seen the same state, generation and step."""
        now, place = self._now(), (status.state, status.generation, status.step)
        if place != self._seen[0]:
            self._seen = place, now
        return replace(status, seconds_at_step=round(now - self._seen[1], 3))

    def _health_code(self, status: HealthStatus) -> int:
        is_training = status.state == _STAGE_NAMES[NodeStage.WORKING]
        return 503 if is_training and status.seconds_at_step > self._stalled_after_s else 200

    def _metrics(self) -> bytes:
        now = time.monotonic()
        if self._rendered_metrics is None or now - self._rendered_metrics[0] > METRICS_MAX_AGE_S:
            self._rendered_metrics = now, self._render_metrics()
        return self._rendered_metrics[1]


def _ready_code(status: HealthStatus) -> int:
    return 200 if status.state == _STAGE_NAMES[NodeStage.WORKING] else 503

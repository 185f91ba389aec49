"""`holdfast observe RUN --serve HOST:PORT`: a run's metrics from its journal, and its agents.

Prometheus asks it for `/metrics` and, by HTTP discovery, for `/targets`. It outlives the agents. So
a run that ended well and one whose machines are all lost look different, which no agent could show.
It reads the run store, asks the agents whether they live, and changes nothing.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress

from holdfast.api.journal_follower import JournalFollower
from holdfast.elastic.agent.health import METRICS_TYPE
from holdfast.elastic.protocol.generation_record import record_of
from holdfast.errors import HoldfastError
from holdfast.launch.run.node_checks import AgentAnswer, agent_addresses, ask_agents
from holdfast.launch.run.runs import Run, read_secrets
from holdfast.report.live.metrics import RunFacts, RunMetrics
from holdfast.wire.http.connection import BodyHandler, HttpResponse, RequestHead
from holdfast.wire.http.connection_limits import ConnectionLimiter
from holdfast.wire.http.refusals import HEALTH
from holdfast.wire.http.server import HttpListener
from holdfast.wire.http.sockets import bind_listener
from holdfast.wire.term import HolderReply, newest_generation, newest_term

ASK_INTERVAL_S = 5.0
"""Seconds between two rounds of questions to the agents."""


class Observer:
    """Follows one run. `serve` answers until it is cancelled."""

    def __init__(self, run: Run, ask_interval_s: float = ASK_INTERVAL_S) -> None:
        self._run, self._ask_interval_s = run, ask_interval_s
        info = {"model": run.config.task.name or run.config.model.preset or "decoder"}
        self.metrics = RunMetrics(run.config.name, info, facts=RunFacts.of(run.config))
        self._targets: list[dict[str, object]] = []
        self._closing = threading.Event()

    def serve(self, host: str, port: int, on_ready: threading.Event | None = None) -> None:
        """Answer requests until the process is interrupted. Raises UserError for an address that
        cannot be bound, and what the run store raises."""
        with bind_listener(host, port, "--serve") as bound:
            follower = JournalFollower(self._run.store, [self.metrics.observe])
            self.metrics.replay(follower.read_all())
            follower.start()
            asking = threading.Thread(target=self._ask_all_the_time, name="ask", daemon=True)
            asking.start()
            if on_ready is not None:
                on_ready.set()
            try:
                asyncio.run(HttpListener(_Application(self), bound).serve())
            finally:
                self._closing.set()
                follower.close()

    def targets(self) -> bytes:
        """Return the agents as Prometheus's HTTP discovery takes them."""
        return json.dumps(self._targets).encode()

    def _ask_all_the_time(self) -> None:
        while True:
            with suppress(HoldfastError, KeyError, ValueError):  # the run store is asked again
                self.look(self._ask())
            if self._closing.wait(self._ask_interval_s):
                return

    def _ask(self) -> Mapping[str, AgentAnswer]:
        store = self._run.store
        newest = newest_generation(store)
        record = record_of(store, newest) if newest else None
        addresses = agent_addresses(record, newest_term(store)[1])
        return ask_agents(addresses, read_secrets(self._run.folder))

    def look(self, answers: Mapping[str, AgentAnswer]) -> None:
        """Take what the agents answered."""
        living = {n: a for n, a in answers.items() if a.reply is HolderReply.LIVES}
        self.metrics.set_agents(len(living))
        self._targets = [
            {
                "targets": [answer.check.health],
                "labels": {"node": node, "run": self._run.config.name},
            }
            for node, answer in living.items()
            if answer.check is not None and answer.check.health
        ]


class _Application:
    """The listener's answers."""

    def __init__(self, observer: Observer) -> None:
        self.limiter = ConnectionLimiter(HEALTH)
        self.tls: ssl.SSLContext | None = None  # so that Prometheus can read it
        self._observer = observer

    def admit(self, head: RequestHead) -> HttpResponse | BodyHandler:
        path = head.target.partition(b"?")[0]
        if head.method != b"GET" or path not in (b"/metrics", b"/targets"):
            return HttpResponse(404, close=True)
        if path == b"/targets":
            return HttpResponse(
                200, self._observer.targets(), b"content-type: application/json\r\n"
            )
        return HttpResponse(200, self._observer.metrics.render(), METRICS_TYPE)

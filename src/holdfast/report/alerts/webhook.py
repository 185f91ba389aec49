"""`observe.webhook`: a run evaluates its alerts by itself, and posts each change to an address.

It is a tracker, and so a process of its own that the leading agent starts, with the priority of the
workers. Training never waits for it, and it follows the leader. It posts Alertmanager's format,
one message for the changes of a cause.

    alerts/<alert>/<number>.json     in the run store: the alert's changes, counted from 1

Before a change is posted, its object is created if it is absent. Of several evaluators only one
can do so. So there is at most one request for each alert and change, also after kills. A change
whose request could not even connect is posted again. Any other failure is logged, and not repeated.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from holdfast.config.run import RunConfig
from holdfast.config.sections.observe import (
    FROM_ENVIRONMENT,
    TOKEN_VARIABLE,
    WEBHOOK_VARIABLE,
    ServiceObjective,
)
from holdfast.core.json_parsing import parse_json
from holdfast.errors import HoldfastError
from holdfast.events import Record
from holdfast.report.alerts.catalogue import ALERTS, Alert
from holdfast.report.alerts.evaluate import AlertEvaluator, Change, find_changes, webhook_body
from holdfast.report.alerts.objectives import objective_alerts
from holdfast.report.ledger.ordering import order_records
from holdfast.report.live.metrics import RunFacts, RunMetrics
from holdfast.report.trackers.tracker import RunInfo, Tracker
from holdfast.wire.journal import JournalTail
from holdfast.wire.store.run_location import store_of_run
from holdfast.wire.store.run_store import AlreadyExistsError, RunStore

logger = logging.getLogger(__name__)

PLACE = f"{__name__}:WebhookTracker"
PREFIX = "alerts/"
POST_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 2 * POST_TIMEOUT_S


class NotConnectedError(Exception):
    """No byte of the request has left this machine."""


def webhook_options(config: RunConfig) -> dict[str, str]:
    """Return the tracker's options: what of the run file it needs. Raises UserError."""
    return {
        "webhook": config.observe.webhook,
        "every_seconds": f"{config.observe.every_seconds:g}",
        "objectives": json.dumps([one.model_dump() for one in config.observe.objectives]),
        "facts": json.dumps(asdict(RunFacts.of(config))),
    }


class WebhookTracker(Tracker):
    """Follows the journal in a thread of its own; the calls of the tracker's process only begin and
    end it."""

    option_names = ("webhook", "every_seconds", "objectives", "facts")

    def start(self, info: RunInfo) -> None:
        """Raises PermissionError if the address is to be in the environment, and is not."""
        address = info.options["webhook"]
        if address == FROM_ENVIRONMENT:
            address = os.environ.get(WEBHOOK_VARIABLE, "")
            if not address:
                raise PermissionError(f"observe.webhook needs the variable {WEBHOOK_VARIABLE}")
        token = os.environ.get(TOKEN_VARIABLE, "")
        objectives = tuple(
            ServiceObjective.model_validate(one) for one in parse_json(info.options["objectives"])
        )
        alerts = [*ALERTS.values(), *objective_alerts(objectives)[0]]
        facts = RunFacts(**parse_json(info.options["facts"]))
        self._watch = AlertWatch(
            info.name,
            store_of_run(info.run_folder),
            alerts,
            facts,
            lambda body: post(address, token, body),
        )
        self._closing, every_s = threading.Event(), float(info.options["every_seconds"])
        self._thread = threading.Thread(target=self._run, args=(every_s,), name="alerts")
        self._thread.daemon = True
        self._thread.start()

    def _run(self, every_s: float) -> None:
        while True:
            is_last = self._closing.is_set()
            try:
                self._watch.look(time.time())
            except HoldfastError as error:  # of the run store
                logger.warning("alerts are not evaluated now, it is tried again: %s", error)
            except Exception:  # our own bug must not end the evaluation for good
                logger.exception("alerts were not evaluated")
            if is_last:
                return
            self._closing.wait(every_s)

    def finish(self, reason: str) -> None:
        """Evaluate once more, now that the journal is complete."""
        self._closing.set()
        self._thread.join(_STOP_TIMEOUT_S)


class AlertWatch:
    """Reads the journal, evaluates the alerts, and posts what has changed."""

    def __init__(
        self,
        run: str,
        store: RunStore,
        alerts: Sequence[Alert],
        facts: RunFacts,
        send: Callable[[dict[str, Any]], None],
        sample_every_s: float = 15.0,
    ) -> None:
        """send: posts a body. It raises NotConnectedError if it is to be tried again, and OSError
        for any other failure."""
        self._run, self._store, self._alerts, self._send = run, store, alerts, send
        self._evaluator = AlertEvaluator(alerts)
        self._metrics = RunMetrics(run, facts=facts)
        self._tail, self._sample_every_s = JournalTail(store), sample_every_s
        self._sampled_at = 0.0
        self._counts, self._told = _read_changes(store)
        self._unsent: list[Change] = []  # claimed by this process, and not connected so far

    def look(self, now: float) -> None:
        """Take what is new in the journal, and post what has changed. Raises what the run store
        raises. now: seconds since the epoch."""
        for record in order_records(self._tail.read_new()):
            self._take(record, now)
        self._evaluator.add_sample(now, self._metrics.refresh())
        found = find_changes(self._alerts, self._evaluator.firing(now), self._told, now)
        changes = self._unsent + [change for change in found if self._claim(change)]
        self._unsent = []
        # The order of the catalogue: that a worker was lost comes before what may be the reason.
        for cause in dict.fromkeys(alert.cause for alert in self._alerts):
            if group := [change for change in changes if change.alert.cause == cause]:
                self._post(group)

    def _take(self, record: Record, now: float) -> None:
        """Take a record. Of the time before this process, samples are made as if it had run."""
        is_due = record.time >= self._sampled_at + self._sample_every_s
        if is_due and now - record.time < self._evaluator.longest_window_s:
            self._sampled_at = record.time
            self._evaluator.add_sample(record.time, self._metrics.refresh())
        self._metrics.observe(record)

    def _claim(self, change: Change) -> bool:
        """Return True if no evaluator has posted this change."""
        key = change.alert.key
        number = self._counts.get(key, 0) + 1
        value = {"status": change.status, "fired_at": change.fired_at}
        try:
            self._store.create(f"{PREFIX}{key}/{number:06d}.json", json.dumps(value).encode())
            is_ours = True
        except AlreadyExistsError:
            is_ours = False
        self._counts[key] = number
        if change.resolved_at is None:
            self._told[key] = change.fired_at
        else:
            self._told.pop(key, None)
        return is_ours

    def _post(self, changes: list[Change]) -> None:
        try:
            self._send(webhook_body(self._run, changes))
        except NotConnectedError as error:
            logger.warning("the webhook cannot be reached, it is tried again: %s", error)
            self._unsent += changes
        except OSError as error:
            names = ", ".join(f"{change.alert.name} {change.status}" for change in changes)
            logger.error("the webhook did not take %s: %s", names, error)


def _read_changes(store: RunStore) -> tuple[dict[str, int], dict[str, float]]:
    """Return how many changes of each alert there were, and those that fire -> since when."""
    counts: dict[str, int] = {}
    told: dict[str, float] = {}
    for name in sorted(store.list(PREFIX)):
        key, _, number = name.removeprefix(PREFIX).partition("/")
        with suppress(ValueError, KeyError, TypeError):  # a torn object counts as told
            value = parse_json(store.get(name))
            if value["status"] == "firing":
                told[key] = float(value["fired_at"])
            else:
                told.pop(key, None)
        counts[key] = int(number.removesuffix(".json"))
    return counts, told


class _NoRedirects(HTTPRedirectHandler):
    """A redirect would send the token to another address."""

    def redirect_request(self, *_: Any) -> None:
        return None


def post(address: str, token: str, body: Mapping[str, Any]) -> None:
    """Post a JSON body. Raises NotConnectedError, and OSError if the address does not take it."""
    headers = {"content-type": "application/json", "user-agent": "holdfast"}
    if token:
        headers["authorization"] = f"Bearer {token}"
    request = Request(address, json.dumps(body).encode(), headers, method="POST")
    try:
        with build_opener(_NoRedirects).open(request, timeout=POST_TIMEOUT_S):
            pass
    except HTTPError:
        raise
    except URLError as error:
        # urllib wraps failures of the connection and of sending; an answer that is cut raises bare.
        if isinstance(error.reason, ConnectionRefusedError | socket.gaierror):
            raise NotConnectedError(str(error.reason)) from None
        raise

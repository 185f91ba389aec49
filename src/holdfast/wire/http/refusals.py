"""Refused requests, counted by listener and reason, and reported at most once a minute.

A listener that refuses calls `count`, which costs a lock and two additions. Nothing of a request
(no address, no body, no header) is kept. A path is named only from the listener's own table. The
first refusal is reported within a second. Those that follow within a minute are reported together
at its end: a stranger can make our journal grow by a line a minute.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal, TypeVar

from holdfast.events import RequestsRefused
from holdfast.wire.http.auth import AuthFault

V = TypeVar("V", int, str)
CONTROL, HEALTH, MOVER, PEERS = "control", "health", "mover", "peers"
"""Names of the listeners, as counted."""

RefusalReason = (
    AuthFault
    | Literal[
        "older generation",
        "unknown generation",
        "malformed",
        "too long",
        "slow",
        "crowded",
        "no such path",
        "not ours",
        "not TLS",
        "wrong certificate",
        "other user",
        "other run",
    ]
)
"""not ours: not even the protocol. not TLS: the listener speaks nothing else. crowded: closed to
make room, having proven nothing."""

ROUTINE_REASONS = frozenset({"older generation", "unknown generation"})
"""Refusals that a late process of the run itself may cause; all other refusals are a stranger's."""

REPORT_INTERVAL_S = 60.0
REPORT_DELAY_S = 1.0
"""Seconds; refusals that follow the first one so closely are reported with it."""


class Refusals:
    """Safe to use from any thread. `close` tells what is left."""

    def __init__(
        self,
        report: Callable[[RequestsRefused], None] | None = None,
        interval_s: float = REPORT_INTERVAL_S,
    ) -> None:
        """`report` is called on a thread of its own."""
        self._report = report
        self._interval_s = interval_s
        self._totals: Counter[tuple[str, str]] = Counter()
        self._reported: Counter[tuple[str, str]] = Counter()
        self._requests: dict[tuple[str, str], str] = {}  # method and path of the newest
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def count(self, listener: str, reason: RefusalReason, request: str = "") -> None:
        """request: method and path from the listener's own table; "": the path is not in it."""
        with self._lock:
            self._totals[listener, reason] += 1
            if request:
                self._requests[listener, reason] = request
            if self._report is not None and self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._run, name="refusals", daemon=True)
                self._thread.start()

    def totals(self) -> dict[str, dict[str, int]]:
        """listener -> reason -> how often, since the start."""
        with self._lock:
            return _by_listener(self._totals)

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(5.0)

    def _run(self) -> None:
        """From a refusal until a minute has passed without another one."""
        self._closing.wait(REPORT_DELAY_S)
        while True:
            with self._lock:
                news = self._totals - self._reported
                if not news:
                    self._thread = None
                    return
                self._reported = self._totals.copy()
                requests, self._requests = self._requests, {}
            if self._report is not None:
                self._report(RequestsRefused(_by_listener(news), _by_listener(requests)))
            self._closing.wait(self._interval_s)


def describe_refusals(event: RequestsRefused) -> str | None:
    """Return one line about strangers; None if no stranger was refused."""
    parts = [
        f"{number} at {listener} ({reason}{_request_text(event, listener, reason)})"
        for listener, reasons in sorted(event.counts.items())
        for reason, number in sorted(reasons.items())
        if reason not in ROUTINE_REASONS
    ]
    return f"refused requests: {', '.join(parts)}" if parts else None


def _request_text(event: RequestsRefused, listener: str, reason: str) -> str:
    request = event.requests.get(listener, {}).get(reason)
    return f", {request}" if request else ""


def _by_listener(values: Mapping[tuple[str, str], V]) -> dict[str, dict[str, V]]:
    nested: dict[str, dict[str, V]] = {}
    for (listener, reason), value in sorted(values.items()):
        nested.setdefault(listener, {})[reason] = value
    return nested

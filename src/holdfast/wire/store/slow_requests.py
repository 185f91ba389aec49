"""Requests that are under way to buckets, so that a command can say which bucket does not answer.

A request that gets no answer is repeated inside its client, which says nothing meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SAY_AFTER_S = 5.0
"""Seconds that a request may take before it is named."""
_POLL_S = 0.5
_under_way: dict[object, tuple[str, float, float]] = {}
"""Request -> address without options, seconds after which it is given up, and its begin."""


@contextmanager
def under_way(where: str, patience_s: float) -> Iterator[None]:
    """Register a request while it lasts."""
    request = object()
    _under_way[request] = where, patience_s, time.monotonic()
    try:
        yield
    finally:
        del _under_way[request]


@contextmanager
def slow_requests_said(say: Callable[[str], None]) -> Iterator[None]:
    """Call `say` from another thread, once for each address with a request that takes long."""
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(say, ended), name="slow requests", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _watch(say: Callable[[str], None], ended: threading.Event) -> None:
    said = set[str]()
    while not ended.wait(min(_POLL_S, SAY_AFTER_S)):
        for where, patience_s, begin in list(_under_way.values()):
            if where not in said and time.monotonic() - begin > SAY_AFTER_S:
                said.add(where)
                say(
                    f"{where} has not answered for {SAY_AFTER_S:g} s: a request is repeated, and "
                    f"given up after {patience_s:g} s at most (options timeout and retries)"
                )

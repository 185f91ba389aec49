"""Holders of a run folder's term that need no process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from holdfast.wire.http.auth import Verifier
from holdfast.wire.http.connection_limits import ConnectionLimiter
from holdfast.wire.http.server import Handler, SignedApplication
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import TERM_PATH
from tests.support.listener import listening

QUIET = 0.3  # Seconds without growth after which these tests take a holder for dead


@contextmanager
def growing(store: FolderStore, key: str = "terms/0000000001-alive") -> Iterator[None]:
    """Within, an object of the run folder grows, as that of a trainer at work."""
    ended = threading.Event()

    def grow() -> None:
        while not ended.wait(QUIET / 10):
            store.append(key, b".")

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def agent(
    secret: Secret,
    handlers: Mapping[str, Handler] | None = None,
    limiter: ConnectionLimiter | None = None,
) -> Iterator[str]:
    """The address of something that answers as an agent's control does. handlers: path -> what
    answers more than the term's requests. limiter: instead of the usual one."""
    paths = {TERM_PATH, *(handlers or {})}

    async def answer(_: int, body: dict[str, object]) -> dict[str, object]:
        return {"hears": False, "term": 1}

    def make() -> SignedApplication:
        guard = SignedApplication(
            {TERM_PATH: answer, **(handlers or {})},
            secret,
            Verifier(secret, time.time),
            lambda: 0,
            generationless_paths=frozenset(paths),
        )
        guard.limiter = limiter or guard.limiter
        return guard

    with listening(make) as address:
        yield address

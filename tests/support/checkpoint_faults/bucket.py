"""Faults of a bucket: a real S3 server over HTTP, and a proxy that fails, drops, stalls and kills.

These cases come last: server, proxy and client have threads, and nothing is forked after them.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.wire.store.location import open_store
from holdfast.wire.store.run_store import RunStore
from tests.support import s3
from tests.support.checkpoint_faults import states
from tests.support.checkpoint_faults.histories import NEWEST, History, Protocol, history
from tests.support.checkpoint_faults.interrupted import Setting
from tests.support.checkpoint_faults.oracle import expected
from tests.support.checkpoint_faults.verdict import (
    Restored,
    WrongError,
    check_not_lost,
    judge,
    restore,
)
from tests.support.s3 import Fault, Proxy, Request

TIMEOUT = 1
RETRIES = 2
BOUND = 60.0
"""Seconds within which a store that is out of reach must have ended in a sentence."""


class Bucket:
    """A prefix of its own in the server's bucket."""

    def __init__(self, name: str) -> None:
        for variable, value in s3.CREDENTIALS.items():
            os.environ[variable] = value
        self.name = name
        self.store = self.through(s3.server())

    def location(self, address: tuple[str, int]) -> str:
        return s3.location(address, self.name, timeout=TIMEOUT, retries=RETRIES)

    def through(self, address: tuple[str, int]) -> RunStore:
        return open_store(self.location(address))

    def pour(self, made: History) -> None:
        for key, data in made.files.items():
            self.store.create(key, data)

    def contents(self) -> dict[str, bytes]:
        return {key: self.store.get(key) for key in self.store.list("")}


def reading(folder: Path, setting: Setting, rng: random.Random) -> tuple[str, Restored]:
    """Requests of a restore fail, for a moment or for good. In the first case the newest checkpoint
    must still come. In the second, one sentence must come soon, and never an older checkpoint."""
    bucket, made = Bucket(_name(folder)), history(setting.first, setting.second)
    bucket.pour(made)
    topo = states.topology(rng.randrange(8), 5)
    with _quiet_proxy() as proxy:
        store = bucket.through(proxy.address)
        restore(store, topo)
        at = rng.randrange(len(proxy.log))
        lasting = rng.random() < 0.5
        name, fault = rng.choice(list(_faults(proxy, lasting).items()))
        what = f"{name} {'from' if lasting else 'at'} request {at} of {len(proxy.log)}"
        proxy.log.clear()
        proxy.rule = _at(proxy, at, fault, lasting)
        found = _bounded(lambda: restore(store, topo), what)
    if found.position != NEWEST and (found.position is not None or not lasting):
        raise WrongError(f"{what}: {found} ({found.sentence}), though the newest is whole")
    if found.position is None and "--fresh" in str(found.sentence):
        raise WrongError(f"{what}: the advice is to start over: {found.sentence}")
    return what, found


def writing(folder: Path, setting: Setting, rng: random.Random) -> tuple[str, Restored]:
    """Requests of a save fail, some of them after the server has done what was asked."""
    bucket, made = Bucket(_name(folder)), history(setting.first, setting.second)
    bucket.pour(made)
    with _quiet_proxy() as proxy:
        protocol = Protocol(
            bucket.through(proxy.address), (setting.second, setting.third), setting.order
        )
        at, lasting = rng.randrange(60), rng.random() < 0.4
        name, fault = rng.choice(list(_faults(proxy, lasting).items()))
        what = f"{name} {'from' if lasting else 'at'} request {at} of the saves"
        proxy.rule = _at(proxy, at, fault, lasting)
        _bounded(protocol.run, what)
    due = expected(bucket.contents(), setting.written)
    found = restore(bucket.store, states.topology(rng.randrange(8), 5))
    judge(found, due)
    check_not_lost(found, protocol.said, what)
    return f"{what}, {protocol.said} committed", found


def killed(folder: Path, setting: Setting, rng: random.Random) -> tuple[str, Restored]:
    """The process that saves gets SIGKILL at one of its requests, before or after the server has
    seen it. The next one continues from what is stored."""
    bucket, made = Bucket(_name(folder)), history(setting.first, setting.second)
    bucket.pour(made)
    before = rng.random() < 0.5
    at = rng.randrange(60)
    with _quiet_proxy() as proxy:
        script = (
            "import sys; from tests.support.checkpoint_faults.bucket import child; "
            "child(*sys.argv[1:])"
        )
        place = bucket.location(proxy.address)
        numbers = map(str, (setting.second, setting.third, setting.order))
        process = subprocess.Popen(
            [sys.executable, "-c", script, place, *numbers], stdout=subprocess.PIPE, text=True
        )
        proxy.rule = killing(process, proxy, at, before)
        out, _ = process.communicate(timeout=BOUND)
    said = [int(line) for line in out.split()]
    due = expected(bucket.contents(), setting.written)
    found = restore(bucket.store, states.topology(rng.randrange(8), 5))
    what = f"SIGKILL {'before' if before else 'after'} request {at}, {said} committed"
    judge(found, due)
    check_not_lost(found, said, what)
    return what, found


def killing(
    process: subprocess.Popen[str], proxy: Proxy, at: int, before: bool
) -> Callable[[Request], Fault | None]:
    """A rule: SIGKILL to the process before its request number `at` is served, or behind it."""

    def kill() -> None:
        process.send_signal(signal.SIGKILL)
        process.wait()

    def rule(request: Request) -> Fault | None:
        if len(proxy.log) - 1 < at:
            return None
        if before:
            kill()
            return Fault()
        return Fault(forward=True) if process.poll() is not None else _after(kill)

    return rule


def _after(act: Callable[[], None]) -> Fault:
    """The server carries out the request, but sends no answer."""
    act()
    return Fault(forward=True)


def child(place: str, second: str, third: str, order: str) -> None:
    """The process of `killed`."""
    protocol = Protocol(open_store(place), (int(second), int(third)), int(order))
    protocol.note = lambda step: print(step, flush=True)  # type: ignore[method-assign]
    protocol.run()


# --- helpers ------------------------------------------------------------------------------------
@contextmanager
def _quiet_proxy() -> Iterator[Proxy]:
    """Connections that clients give up are part of the cases, not worth a traceback."""
    with s3.proxied() as proxy:
        proxy._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        yield proxy


def _name(folder: Path) -> str:
    return f"{folder.parent.parent.name}-{folder.parent.name}"


def _faults(proxy: Proxy, lasting: bool) -> dict[str, Callable[[], Fault | None]]:
    """What may become of a request. A stall ends when the proxy does, or after the time-out."""

    def stall() -> None:
        proxy.closing.wait(TIMEOUT + 0.5)

    found: dict[str, Callable[[], Fault | None]] = {
        "500": lambda: Fault(500),
        "503 SlowDown": lambda: Fault(503, "SlowDown"),
        "dropped": lambda: Fault(),
        "done and dropped": lambda: Fault(forward=True),
        "cut": lambda: Fault(forward=True, after=1),
    }
    if not lasting:
        found["stall"] = stall
    return found


def _at(
    proxy: Proxy, at: int, fault: Callable[[], Fault | None], lasting: bool
) -> Callable[[Request], Fault | None]:
    def rule(request: Request) -> Fault | None:
        number = len(proxy.log) - 1
        return fault() if number == at or (lasting and number > at) else None

    return rule


def _bounded(body: Callable[[], Restored | None], what: str) -> Restored:
    """Run it; it must come to an end in bounded time."""
    found: list[Restored | None] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(body())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(BOUND)
    if thread.is_alive():
        raise WrongError(f"{what}: no end after {BOUND:g} s")
    if failed:
        raise failed[0]
    return found[0] or Restored(None)


KINDS: dict[str, Callable[[Path, Setting, random.Random], tuple[str, Restored]]] = {
    "bucket-reading": reading,
    "bucket-writing": writing,
    "bucket-killed": killed,
}

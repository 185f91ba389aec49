"""A metadata service that speaks the protocols of three clouds, over real HTTP. It may be ill: then
it answers with an error page, breaks off, sends a byte now and then, or nothing at all."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from holdfast.elastic.notices.source import NoticeSource, TerminationWarning

PAGE = b"<html><body><h1>503 Service Unavailable</h1></body></html>"


def polled(source: NoticeSource) -> TerminationWarning:
    """What a source says, which must be something."""
    found = source.poll()
    assert found is not None
    return found


@dataclass
class Metadata:
    """The service's present answer. `asked` counts requests by path, without the query.

    `illness`: "" (none), "refuses" (503), "page" (an error page with status 200), "half" (breaks
    off), "drips" (a byte now and then), "hangs". `started`: acknowledged events. `open`: requests
    that wait for a change.
    """

    address: str = ""
    action: dict[str, str] | None = None
    rebalance: dict[str, str] | None = None
    preempted: str = "FALSE"
    maintenance: str = "NONE"
    events: list[dict[str, Any]] = field(default_factory=list)
    token: str = "one"
    name: str = "vm-1"
    illness: str = ""
    etags: bool = True
    asked: dict[str, int] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    open: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def get(self, path: str, headers: Any) -> tuple[int, bytes]:
        if path.startswith("/latest/meta-data/"):
            return self._aws(path, headers)
        if path.startswith("/computeMetadata/"):
            if headers["Metadata-Flavor"] != "Google":
                return 403, b"Missing Metadata-Flavor:Google header."
            return self._google(path)
        if headers["Metadata"] != "true":
            return 400, b""
        if path.startswith("/metadata/instance/compute/name"):
            return 200, self.name.encode()
        if path.startswith("/metadata/scheduledevents"):
            return 200, json.dumps({"DocumentIncarnation": 1, "Events": self.events}).encode()
        return 404, b""

    def _google(self, path: str) -> tuple[int, bytes]:
        """Held back while the value is the one of `last_etag`."""
        name, query = urlsplit(path).path.rpartition("/")[2], parse_qs(urlsplit(path).query)
        until = time.monotonic() + float(query.get("timeout_sec", ["60"])[0])
        known = query.get("last_etag", [""])[0]
        self.open += bool(known)
        while query.get("wait_for_change") == ["true"] and self.etag(name) == known:
            if self.over.wait(0.005) or time.monotonic() > until or self.illness:
                break
        self.open -= bool(known)
        return 200, self.value(name).encode()

    def value(self, name: str) -> str:
        return {"preempted": self.preempted, "maintenance-event": self.maintenance}[name]

    def etag(self, name: str) -> str:
        return hashlib.md5(self.value(name).encode()).hexdigest()[:16]

    def post(self, path: str, headers: Any, body: bytes) -> tuple[int, bytes]:
        if headers["Metadata"] != "true" or not path.startswith("/metadata/scheduledevents"):
            return 400, b""
        wanted = [request["EventId"] for request in json.loads(body)["StartRequests"]]
        if not {event["EventId"] for event in self.events} >= set(wanted):
            return 400, b"no such event"
        self.started += wanted
        return 200, b""

    def _aws(self, path: str, headers: Any) -> tuple[int, bytes]:
        if headers["X-aws-ec2-metadata-token"] != self.token:
            return 401, b""
        said = {
            "/latest/meta-data/spot/instance-action": self.action,
            "/latest/meta-data/events/recommendations/rebalance": self.rebalance,
        }.get(path)
        return (404, b"") if said is None else (200, json.dumps(said).encode())


@contextmanager
def metadata_service() -> Iterator[Metadata]:
    """At `address` until the block ends."""
    world = Metadata()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(*world.get(self.path, self.headers))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(*world.post(self.path, self.headers, body))

        def do_PUT(self) -> None:
            seconds = self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
            good = self.path == "/latest/api/token" and 1 <= int(seconds) <= 21600
            self._answer(200 if good else 400, world.token.encode() if good else b"")

        def _answer(self, status: int, body: bytes) -> None:
            path = urlsplit(self.path).path
            world.asked[path] = world.asked.get(path, 0) + 1
            if world.illness == "hangs":
                world.over.wait(120)
                return
            if world.illness == "refuses":
                status, body = 503, PAGE
            if world.illness == "page":
                status, body = 200, PAGE
            self.send_response(status)
            if world.etags and path.startswith("/computeMetadata/"):
                self.send_header("ETag", world.etag(path.rpartition("/")[2]))
            whole = max(len(body), 40) if world.illness in ("half", "drips") else len(body)
            self.send_header("Content-Length", str(whole))
            self.end_headers()
            if world.illness == "drips":
                self._drip()
            else:
                self.wfile.write(body[: len(body) // 2] if world.illness == "half" else body)

        def _drip(self) -> None:
            with suppress(OSError):
                while not world.over.wait(0.05):
                    self.wfile.write(b" ")
                    self.wfile.flush()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        world.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield world
        finally:
            world.over.set()
            server.shutdown()
            thread.join()

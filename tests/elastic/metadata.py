"""A metadata service that speaks the protocols of three clouds, over real HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Metadata:
    """What the service says now. `asked` counts requests by path."""

    address: str = ""
    action: dict[str, str] | None = None
    rebalance: dict[str, str] | None = None
    preempted: str = "FALSE"
    maintenance: str = "NONE"
    events: list[dict[str, Any]] = field(default_factory=list)
    token: str = "one"
    broken: bool = False
    asked: dict[str, int] = field(default_factory=dict)

    def get(self, path: str, headers: Any) -> tuple[int, bytes]:
        if path.startswith("/latest/meta-data/"):
            return self._aws(path, headers)
        if path.startswith("/computeMetadata/"):
            if headers["Metadata-Flavor"] != "Google":
                return 403, b"Missing Metadata-Flavor:Google header."
            name = path.rpartition("/")[2]
            return 200, {"preempted": self.preempted,
                         "maintenance-event": self.maintenance}[name].encode()  # fmt: skip
        if headers["Metadata"] != "true":
            return 400, b""
        if path.startswith("/metadata/instance/compute/name"):
            return 200, b"vm-1"
        if path.startswith("/metadata/scheduledevents"):
            return 200, json.dumps({"DocumentIncarnation": 1, "Events": self.events}).encode()
        return 404, b""

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

        def do_PUT(self) -> None:
            seconds = self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
            good = self.path == "/latest/api/token" and 1 <= int(seconds) <= 21600
            self._answer(200 if good else 400, world.token.encode() if good else b"")

        def _answer(self, status: int, body: bytes) -> None:
            world.asked[self.path] = world.asked.get(self.path, 0) + 1
            if world.broken:
                status, body = 503, b""
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        world.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield world
        finally:
            server.shutdown()
            thread.join()

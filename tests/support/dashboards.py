"""A dashboard in a process of its own, and requests to it as a browser or a program makes them."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from tests.support.commands import start


class Served:
    """A dashboard's address, and its answers."""

    def __init__(self, address: str) -> None:
        self.address = address
        parts = urlsplit(address)
        self.port, self.token = parts.port or 0, parse_qs(parts.query)["token"][0]

    def get(
        self, path: str, method: str = "GET", headers: Mapping[str, str] | None = None
    ) -> http.client.HTTPResponse:
        """Ask for a path, without the token. The answer's body is read by the caller."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, headers=dict(headers or {}))
        return connection.getresponse()

    def events(self, path: str = "/events") -> Iterator[dict[str, object]]:
        """Yield the states of a stream, as they come."""
        answer = self.get(path, headers={"Authorization": f"Bearer {self.token}"})
        assert answer.status == 200, answer.read()
        while line := answer.readline():
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


@contextmanager
def dashboard_of(run: Path, *options: str) -> Iterator[Served]:
    """Serve a run, or a folder of runs."""
    process = start("dashboard", run, "--json", *options)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield Served(json.loads(line)["address"])
        process.terminate()
        assert process.wait(120) == 0, process.stderr.read()
    finally:
        process.kill()
        process.stdout.close()
        process.stderr.close()

"""A real Prometheus and a real Alertmanager for a run, a receiver of its alerts, and the observer.

All times of the rules are divided by `SPEED`, so that an alert of ten minutes takes ten seconds.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

from holdfast.config.run import RunConfig
from holdfast.report.alerts.catalogue import SEVERITIES
from holdfast_platform.observe.folder import observe_files, write_files
from tests.support.commands import end_with_starter, start
from tests.support.listener import free_ports
from tests.support.ranks import wait_until

PROGRAMS = ("prometheus", "prometheus-alertmanager")
SPEED = 60.0
MESSAGE_TIMEOUT_S = 240.0
"""Seconds for one message; a quiet machine takes a tenth of it."""


def missing_program() -> str | None:
    """Return the program that is not installed; None if all are."""
    return next((name for name in PROGRAMS if shutil.which(name) is None), None)


@dataclass
class Receiver:
    """A webhook: the alerts that it was sent, in the order in which they came."""

    address: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    answer: int = 200

    def statuses(self, name: str) -> list[str]:
        """Return firing or resolved of each message about an alert."""
        return [
            alert["status"]
            for body in self.bodies
            for alert in body["alerts"]
            if alert["labels"]["alertname"] == name
        ]


@contextmanager
def receiver() -> Iterator[Receiver]:
    """A webhook on loopback."""
    found = Receiver()

    def take(path: str, headers: dict[str, str], body: bytes) -> int:
        found.headers.append(headers)
        found.bodies.append(json.loads(body))
        return found.answer

    with posts_to(take) as address:
        found.address = f"{address}/hook"
        yield found


@contextmanager
def posts_to(take: Callable[[str, dict[str, str], bytes], int]) -> Iterator[str]:
    """A server on loopback. take: gets path, headers and body of a POST, and returns the status."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            self.send_response(take(self.path, headers, body))
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class Monitoring:
    """What the servers know."""

    def __init__(self, prometheus: str, hook: Receiver, logs: Sequence[Path]) -> None:
        self._prometheus, self.hook, self._logs = prometheus, hook, logs
        self.times: list[tuple[str, float, float]] = []
        """Alert, seconds from its fault to its message, seconds from its end to that message."""

    def query(self, text: str) -> list[dict[str, Any]]:
        address = f"http://{self._prometheus}/api/v1/query?{urlencode({'query': text})}"
        with urlopen(address, timeout=60) as answer:
            return list(json.load(answer)["data"]["result"])

    def firing(self) -> set[str]:
        """Return the alerts that fire now."""
        return {each["metric"]["alertname"] for each in self.query('ALERTS{alertstate="firing"}')}

    def wait_message(self, name: str, status: str, number: int = 0) -> float:
        """Wait until the webhook has `number` + 1 such messages; return the seconds."""
        begun = time.monotonic()
        wait_until(
            lambda: self.hook.statuses(name).count(status) > number,
            MESSAGE_TIMEOUT_S,
            lambda: f"{name} {status}; fires: {self.firing()}; {self.story()}",
        )
        return time.monotonic() - begun

    def story(self) -> str:
        return "".join(f"--- {path.name}\n{path.read_text()[-1500:]}" for path in self._logs)


def _is_ready(address: str) -> bool:
    with suppress(URLError, OSError):
        return bool(urlopen(address, timeout=5).status == 200)
    return False


@contextmanager
def monitoring(config: RunConfig, run_folder: Path, folder: Path) -> Iterator[Monitoring]:
    """Watch the run in `run_folder`, which must have begun."""
    ports = free_ports(3)
    observer, prometheus, alertmanager = (f"127.0.0.1:{port}" for port in ports)
    with ExitStack() as stack, receiver() as hook:
        files, _ = observe_files(
            config,
            str(run_folder),
            receivers=dict.fromkeys(SEVERITIES, hook.address),
            observer=observer,
            alertmanager=alertmanager,
            scale=1 / SPEED,
        )
        write_files(files, folder)
        logs = []

        def serve(name: str, *command: str) -> None:
            logs.append(folder / f"{name}.log")
            file = stack.enter_context(logs[-1].open("wb"))
            process = subprocess.Popen(
                command, cwd=folder, stdout=file, stderr=file, preexec_fn=end_with_starter
            )
            stack.callback(process.wait)
            stack.callback(process.kill)

        watcher = start("observe", run_folder, "--serve", observer)
        stack.callback(watcher.communicate)
        stack.callback(watcher.kill)
        serve(
            "prometheus",
            "prometheus",
            "--config.file=prometheus.yml",
            "--storage.tsdb.path=tsdb",
            f"--web.listen-address={prometheus}",
        )
        serve(
            "alertmanager",
            "prometheus-alertmanager",
            "--config.file=alertmanager.yml",
            "--storage.path=alertmanager",
            f"--web.listen-address={alertmanager}",
            "--cluster.listen-address=",
        )
        for address in (f"{prometheus}/-/ready", f"{alertmanager}/-/ready", f"{observer}/metrics"):
            wait_until(lambda at=address: _is_ready(f"http://{at}"), what=address)
        yield Monitoring(prometheus, hook, logs)

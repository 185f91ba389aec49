"""A server of a tracker that fails in every way, and the tracker that speaks to it.

The tracker runs in a process of its own: `tests.support.tracker_server:ServerTracker`.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from collections import Counter
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from holdfast.events import Record
from holdfast.report.trackers.tracker import RunInfo, Tracker

TRACKER = "tests.support.tracker_server:ServerTracker"


class ServerTracker(Tracker):
    """Sends each step in a request of its own, and waits for the answer without a limit."""

    can_rewind = True

    def start(self, info: RunInfo) -> None:
        self._url = info.options["url"]
        self._send({"start": info.key, "delivered": dict(info.delivered)})

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        self._send({"step": step, "values": dict(values)})

    def rewind(self, step: int) -> None:
        self._send({"rewind": step})

    def finish(self, reason: str) -> None:
        self._send({"finish": reason})

    def _send(self, value: dict[str, Any]) -> None:
        with urllib.request.urlopen(self._url, json.dumps(value).encode()) as answer:
            answer.read()


class SecretiveTracker(Tracker):
    """Prints the keys that it finds in its environment, and fails with one of them."""

    def start(self, info: RunInfo) -> None:
        import os

        print("key", os.environ["WANDB_API_KEY"], flush=True)
        os.system("echo child $MLFLOW_TRACKING_PASSWORD")

    def event(self, record: Record) -> None:
        import os

        raise RuntimeError(f"refused: https://me:{os.environ['MLFLOW_TRACKING_PASSWORD']}@host/")


class TrackerServer:
    """Listens on a port of this machine. `mode` is ok, hang, refuse, die, or a status as "401"."""

    def __init__(self) -> None:
        self.mode = "ok"
        self.points: dict[tuple[str, int], Mapping[str, float]] = {}  # group and step
        self.messages: list[dict[str, Any]] = []  # other than steps
        self.requests: Counter[str] = Counter()  # by mode
        self.repeated = 0  # steps that were there already
        self._is_closing = threading.Event()
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                server.answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}/"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        value = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        mode = self.mode
        self.requests[mode] += 1
        if mode == "hang":
            self._is_closing.wait()
            return
        if mode == "die":  # after it took the value, before the answer is complete
            self._take(value)
            request.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhal")
            return
        if mode == "ok":
            self._take(value)
        request.send_response(200 if mode == "ok" else int(mode) if mode.isdigit() else 503)
        request.end_headers()

    def _take(self, value: dict[str, Any]) -> None:
        with self._lock:
            if "step" not in value:
                self.messages.append(value)
            if "rewind" in value:
                kept = {k: v for k, v in self.points.items() if k[1] <= value["rewind"]}
                self.points = kept
            if "step" in value:
                group = "validation" if "validation/loss" in value["values"] else "train"
                self.repeated += (group, value["step"]) in self.points
                self.points[group, value["step"]] = value["values"]

    def steps(self, group: str = "train") -> list[int]:
        with self._lock:
            return sorted(step for name, step in self.points if name == group)

    def __enter__(self) -> TrackerServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closing.set()
        self._http.shutdown()
        self._http.server_close()

"""A small server of the OpenAI protocol, with the bad habits of real ones."""

from __future__ import annotations

import json
import math
import random
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL, VOCABULARY, END = "policy", 40, 3


class CompletionServer(ThreadingHTTPServer):
    """Its tokens are a function of prompt, seed and model.

    Attributes:
        habits: names of what goes wrong with the next requests for a completion.
        is_raw: log-probabilities are those at temperature 1.
        changes: is merged into the choice of each answer.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.habits: deque[str] = deque()
        self.is_raw, self.key, self.models = False, "", [MODEL]
        self.changes: dict[str, Any] = {}
        self.asked: list[dict[str, Any]] = []
        self.is_over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: CompletionServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        if self.path != "/v1/models":
            self._answer(404, {"detail": "Not Found"})
        elif self._has_key():
            self._answer(200, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._has_key():
            return
        if self.path == "/v1/load_lora_adapter":
            self.server.models.append(body["lora_name"])
            self._send(200, b"Success: LoRA adapter added")
            return
        self.server.asked.append(body)
        if body["model"] not in self.server.models:
            self._answer(404, {"error": {"message": f"The model `{body['model']}` does not exist"}})
            return
        habit = self.server.habits.popleft() if self.server.habits else ""
        content = json.dumps({"choices": [self._choice(body)]}).encode()
        if habit == "error":
            self._answer(500, {"error": {"message": "CUDA out of memory"}})
        elif habit == "busy":
            self._send(429, b"slow down", {"Retry-After": "0"})
        elif habit == "cut":
            self._head(200, len(content) + 9)
            self.wfile.write(content)
            self.close_connection = True
        elif habit == "reset":
            self.close_connection = True
        elif habit == "html":
            self._send(200, b"<html>bad gateway</html>")
        elif habit == "drip":
            self._head(200, len(content))
            while not self.server.is_over.wait(0.05):  # a byte at a time is never late by itself
                self.wfile.write(b" ")
        else:
            self._send(200, content)

    def _choice(self, body: dict[str, Any]) -> dict[str, Any]:
        draw = random.Random(f"{body['prompt']} {body['seed']} {body['model']}")
        tokens = []
        while len(tokens) < body["max_tokens"] and tokens[-1:] != [END]:
            tokens.append(draw.randrange(VOCABULARY))
            if tokens[-1] not in body["stop_token_ids"] and tokens[-1] == END:
                tokens[-1] += 1
        scale = 1.0 if self.server.is_raw else 1.0 / (body["temperature"] or 1.0)
        logits = [scale * math.sin(i) for i in range(VOCABULARY)]
        total = math.log(sum(map(math.exp, logits)))
        logps = [logits[token] - total for token in tokens]
        best = max(range(VOCABULARY), key=logits.__getitem__)
        top = {f"token_id:{token}": logits[token] - total for token in (tokens[0], best)}
        said = {
            "tokens": [f"token_id:{token}" for token in tokens],
            "token_logprobs": logps,
            "top_logprobs": [top] * len(tokens),
        }
        ended = "stop" if tokens[-1] == END else "length"
        choice = {"text": "", "token_ids": tokens, "logprobs": said, "finish_reason": ended}
        return choice | self.server.changes

    def _has_key(self) -> bool:
        if self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            said = f"{self.headers['Authorization']} is not allowed"
            self._answer(401, {"error": {"message": said}})
            return False
        return True

    def _answer(self, status: int, value: Any) -> None:
        self._send(status, json.dumps(value).encode())

    def _send(self, status: int, content: bytes, head: dict[str, str] | None = None) -> None:
        self._head(status, len(content), head)
        self.wfile.write(content)

    def _head(self, status: int, length: int, head: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(head or {}), "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()


@contextmanager
def completion_server() -> Iterator[CompletionServer]:
    """Serve until the end of the block."""
    server = CompletionServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.is_over.set()
        server.shutdown()
        server.server_close()
        thread.join()

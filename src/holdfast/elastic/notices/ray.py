"""Ray's warning: this node is being drained, and until when.

Ray's head (GCS) answers requests for the draining nodes; there is no callback. Its client ends the
process if the head is away for a minute. So a child sends the requests
(`elastic/notices/ray_probe.py`), and prints a line of JSON for every answer. A child that exits, or
is silent for too long, is started again. The agent itself never imports ray.

HOLDFAST_RAY_NODE_ID names our node. A program that starts an agent inside Ray sets it from
`ray.get_runtime_context().get_node_id()`. If it is not set, our node is the one node that has an
address of this machine.
"""

from __future__ import annotations

import importlib.util
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from holdfast.elastic.notices.source import (
    SHORTEST,
    Meaning,
    Source,
    SourceError,
    Warned,
    json_object,
)
from holdfast.elastic.notices.source import warned as _warned
from holdfast.errors import ConfigError

NODE = "HOLDFAST_RAY_NODE_ID"
START_SECONDS = 60.0
"""Seconds to import ray and reach its head."""
ANSWER_SECONDS = 15.0
OPEN_SECONDS = 10.0
"""Seconds after which a poll without news ends."""
LINE_BYTES = 2**16


def ray(
    where: str, every: float, environment: Mapping[str, str], clock: Callable[[], float]
) -> Source:
    """Return a source that asks Ray's head.

    head_address: HOST:PORT of the head; default: RAY_ADDRESS. Raises ConfigError if no address is
    known or ray is not installed.
    """
    address = (where or environment.get("RAY_ADDRESS", "")).removeprefix("ray://")
    if not address or address == "auto":
        raise ConfigError(
            "the address of Ray's head is not known", where="cluster.notices_at",
            remedy="give HOST:PORT, as `ray start --head` prints it, or set RAY_ADDRESS",
        )  # fmt: skip
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "ray is not installed", where="cluster.notices", remedy="pip install 'holdfast[ray]'"
        )
    return Ray(address, environment.get(NODE, ""), every, environment, clock)


class Ray(Source):
    """Runs the child and reads its lines."""

    def __init__(
        self, address: str, node: str, every: float, environment: Mapping[str, str],
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        child = [sys.executable, "-m", "holdfast.elastic.notices.ray_probe"]
        self._command, self._every = [*child, address, node, str(every)], every
        self._environment, self._clock = dict(environment), clock
        self._child: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._last = ""  # what the last line was, so that only news end a question
        self._over = False

    def ask(self) -> Warned | None:
        """Return the warning in the child's next line that differs from the last one."""
        patience = ANSWER_SECONDS + self._every
        wait, until = patience, time.monotonic() + OPEN_SECONDS
        if self._child is None:
            self._child, self._rest, self._last = self._start(), b"", ""
            wait = START_SECONDS
        try:
            while True:
                line, wait = self._line(self._child, wait), patience
                if line != self._last:
                    self._last = line
                    return self._meaning(line)
                if time.monotonic() > until:
                    return None
        except SourceError:
            self._drop()
            raise

    def _start(self) -> subprocess.Popen[bytes]:
        if self._over:
            raise SourceError("the source is closed")
        try:
            return subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise SourceError(f"the child that asks Ray cannot be started: {error}") from error

    def _line(self, child: subprocess.Popen[bytes], seconds: float) -> str:
        assert child.stdout is not None
        until = time.monotonic() + seconds
        with selectors.DefaultSelector() as waiting:
            waiting.register(child.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not waiting.select(max(0.0, until - time.monotonic())):
                    raise SourceError("Ray's head does not answer")
                more = os.read(child.stdout.fileno(), LINE_BYTES)
                self._rest += more
                if not more:
                    child.kill()
                    raise SourceError(f"the child that asks Ray has ended ({child.wait()})")
                if len(self._rest) > LINE_BYTES:
                    raise SourceError("the child that asks Ray does not end its lines")
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode("utf-8", "replace")

    def _meaning(self, line: str) -> Warned | None:
        said = json_object(line.encode())
        if "error" in said:
            raise SourceError(f"Ray: {str(said['error'])[:300]}")
        deadline = said.get("deadline_ms")
        if deadline is None:
            return None
        if not isinstance(deadline, int) or deadline < 0:
            raise SourceError(f"Ray says {str(deadline)[:40]!r} where a time was expected")
        # 0: the node drains without a deadline.
        left = max(1.0, deadline / 1000 - self._clock()) if deadline else SHORTEST
        return _warned(left, Meaning.GONE, "ray: the node is drained", f"drain {deadline}")

    def close(self) -> None:
        self._over = True
        if (child := self._child) is not None:
            child.kill()
            child.wait()

    def _drop(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for end in (child.stdin, child.stdout):
            if end is not None:
                end.close()

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
import time
from collections.abc import Callable, Mapping

from holdfast.elastic.notices.source import (
    MIN_NOTICE_S,
    Disruption,
    NoticeSource,
    NoticeSourceError,
    TerminationWarning,
    parse_json_object,
)
from holdfast.elastic.notices.source import make_warning as _warned
from holdfast.errors import ConfigError
from holdfast.wire.child_command import module_command

NODE = "HOLDFAST_RAY_NODE_ID"
RAY_START_TIMEOUT_S = 60.0
"""Seconds to import ray and reach its head."""
RAY_REPLY_TIMEOUT_S = 15.0
RAY_POLL_LIMIT_S = 10.0
"""Seconds after which a poll without news ends."""
MAX_LINE_BYTES = 2**16


def make_ray_source(
    head_address: str, interval_s: float, environment: Mapping[str, str], clock: Callable[[], float]
) -> NoticeSource:
    """Return a source that asks Ray's head.

    head_address: HOST:PORT of the head; default: RAY_ADDRESS. Raises ConfigError if no address is
    known or ray is not installed.
    """
    address = (head_address or environment.get("RAY_ADDRESS", "")).removeprefix("ray://")
    if not address or address == "auto":
        raise ConfigError(
            "the address of Ray's head is not known",
            where="cluster.notices_at",
            remedy="give HOST:PORT, as `ray start --head` prints it, or set RAY_ADDRESS",
        )
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "ray is not installed", where="cluster.notices", remedy="pip install 'holdfast[ray]'"
        )
    return RaySource(address, environment.get(NODE, ""), interval_s, environment, clock)


class RaySource(NoticeSource):
    """Runs the child and reads its lines."""

    def __init__(
        self,
        address: str,
        node_id: str,
        interval_s: float,
        environment: Mapping[str, str],
        clock: Callable[[], float],
    ) -> None:
        probe = "holdfast.elastic.notices.ray_probe"
        self._command = module_command(probe, address, node_id, str(interval_s))
        self._interval_s = interval_s
        self._environment, self._clock = dict(environment), clock
        self._child: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._last_line = ""  # what the last line was, so that only news end a question
        self._is_closed = False

    def poll(self) -> TerminationWarning | None:
        """Return the warning in the child's next line that differs from the last one."""
        patience = RAY_REPLY_TIMEOUT_S + self._interval_s
        wait, until = patience, time.monotonic() + RAY_POLL_LIMIT_S
        if self._child is None:
            self._child, self._buffer, self._last_line = self._start_child(), b"", ""
            wait = RAY_START_TIMEOUT_S
        try:
            while True:
                line, wait = self._read_line(self._child, wait), patience
                if line != self._last_line:
                    self._last_line = line
                    return self._to_warning(line)
                if time.monotonic() > until:
                    return None
        except NoticeSourceError:
            self._stop_child()
            raise

    def _start_child(self) -> subprocess.Popen[bytes]:
        if self._is_closed:
            raise NoticeSourceError("the source is closed")
        try:
            return subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise NoticeSourceError(
                f"the child that asks Ray cannot be started: {error}"
            ) from error

    def _read_line(self, child: subprocess.Popen[bytes], timeout_s: float) -> str:
        assert child.stdout is not None
        until = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as waiting:
            waiting.register(child.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not waiting.select(max(0.0, until - time.monotonic())):
                    raise NoticeSourceError("Ray's head does not answer")
                more = os.read(child.stdout.fileno(), MAX_LINE_BYTES)
                self._buffer += more
                if not more:
                    child.kill()
                    raise NoticeSourceError(f"the child that asks Ray has ended ({child.wait()})")
                if len(self._buffer) > MAX_LINE_BYTES:
                    raise NoticeSourceError("the child that asks Ray does not end its lines")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode("utf-8", "replace")

    def _to_warning(self, line: str) -> TerminationWarning | None:
        said = parse_json_object(line.encode())
        if "error" in said:
            raise NoticeSourceError(f"Ray: {str(said['error'])[:300]}")
        deadline = said.get("deadline_ms")
        if deadline is None:
            return None
        if not isinstance(deadline, int) or deadline < 0:
            raise NoticeSourceError(f"Ray says {str(deadline)[:40]!r} where a time was expected")
        # 0: the node drains without a deadline.
        left = max(1.0, deadline / 1000 - self._clock()) if deadline else MIN_NOTICE_S
        return _warned(left, Disruption.GONE, "ray: the node is drained", f"drain {deadline}")

    def close(self) -> None:
        self._is_closed = True
        if (child := self._child) is not None:
            child.kill()
            child.wait()

    def _stop_child(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for end in (child.stdin, child.stdout):
            if end is not None:
                end.close()

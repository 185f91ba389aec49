"""A host of a controller: runs its parts of gangs, one after the other, and reports how they end.

The queue of parts comes ahead of time. So the next part begins without a question. A part that is
not in the queue any more is ended: TERM, and KILL if it has not ended after some seconds. If the
controller does not answer for long, the host ends what it runs and leaves.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from holdfast.errors import UserError
from holdfast.wire.http.auth import AuthError
from holdfast.wire.http.client import Client, RequestError, UnreachableError
from holdfast.wire.secret import Secret
from holdfast_platform.pods.messages import (
    HOST_PATH,
    MAX_OUTPUT_BYTES,
    HostOrders,
    HostReport,
    Part,
    PartEnd,
)

GRACE_S = 20.0
"""Seconds between TERM and KILL of a part that is not wanted any more."""
CONTROLLER_TIMEOUT_S = 60.0
"""Seconds without an answer after which a host leaves."""
NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit codes of a program that cannot be started, as a shell has them."""
_POLL_S = 0.05


@dataclass
class _Running:
    part: Part
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    kill_at: float | None = None


class PodHost:
    """One host. `run` returns when the controller has ended it."""

    def __init__(
        self, address: str, secret: Secret, name: str, group: str, say: Callable[[str], None]
    ) -> None:
        self._client = Client(address, secret, connect_retry_s=CONTROLLER_TIMEOUT_S)
        self._name, self._group, self._say = name, group, say
        self._mark = secrets.token_hex(8)
        self._queue: tuple[Part, ...] = ()
        self._running: _Running | None = None
        self._ended: list[PartEnd] = []
        self._done: set[tuple[int, int]] = set()

    def run(self) -> None:
        """Raises UserError if the controller refuses this host or does not answer any more."""
        seen = -1
        try:
            while True:
                self._advance()
                orders = self._ask(seen)
                if orders.leave:
                    return
                seen, self._queue = orders.number, orders.queue
        finally:
            self._end_all()
            self._client.close()

    def _ask(self, seen: int) -> HostOrders:
        part = None if self._running is None else self._running.part
        running = None if part is None else (part.gang, part.attempt)
        told = tuple(self._ended)
        report = HostReport(self._name, self._group, self._mark, seen, running, told)
        try:
            answer = self._client.post(HOST_PATH, report.to_json())
        except (UnreachableError, AuthError, RequestError) as error:
            raise UserError(
                f"the controller cannot be asked ({error})",
                where=self._client.address,
                remedy="start this host again when the controller is there, with its secret",
            ) from None
        self._ended = self._ended[len(told) :]
        return HostOrders.from_json(answer)

    # --- parts ------------------------------------------------------------------------------
    def _advance(self) -> None:
        """Collect a part that has ended, end one that is not wanted, begin the next one."""
        if self._running is not None:
            self._look_after(self._running)
        if self._running is None:
            for part in self._queue:
                if (part.gang, part.attempt) not in self._done:
                    self._begin(part)
                    break
        if self._running is not None and not self._ended:
            with suppress(subprocess.TimeoutExpired):
                self._running.process.wait(_POLL_S)

    def _look_after(self, running: _Running) -> None:
        code = running.process.poll()
        if code is not None:
            _signal_group(running.process, signal.SIGKILL)  # what the program left behind
            size = running.output.seek(0, os.SEEK_END)
            running.output.seek(max(0, size - MAX_OUTPUT_BYTES))
            text = running.output.read().decode("utf-8", "replace")
            running.output.close()
            self._running = None
            self._report_end(running.part, code if code >= 0 else 128 - code, text)
            return
        key = (running.part.gang, running.part.attempt)
        if key in {(part.gang, part.attempt) for part in self._queue}:
            return
        if running.kill_at is None:
            running.kill_at = time.monotonic() + GRACE_S
            _signal_group(running.process, signal.SIGTERM)
        elif time.monotonic() > running.kill_at:
            _signal_group(running.process, signal.SIGKILL)

    def _begin(self, part: Part) -> None:
        descriptor, path = tempfile.mkstemp()
        os.unlink(path)  # it lives as long as the part
        output = os.fdopen(descriptor, "w+b")
        environment = os.environ | {
            "HOLDFAST_GANG": str(part.gang),
            "HOLDFAST_GANG_RANK": str(part.rank),
            "HOLDFAST_GANG_HOSTS": ",".join(part.hosts),
        }
        try:
            process = subprocess.Popen(
                part.words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            output.close()
            code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            self._report_end(part, code, f"{part.words[0]}: {error.strerror}\n")
            return
        self._say(f"gang {part.gang}: {part.words[0]}, rank {part.rank} of {len(part.hosts)}")
        self._running = _Running(part, process, output)

    def _report_end(self, part: Part, code: int, output: str) -> None:
        self._done.add((part.gang, part.attempt))
        self._ended.append(PartEnd(part.gang, part.attempt, code, output))

    def _end_all(self) -> None:
        if self._running is None:
            return
        _signal_group(self._running.process, signal.SIGTERM)
        try:
            with suppress(subprocess.TimeoutExpired):
                self._running.process.wait(GRACE_S)
        finally:  # also after a second Ctrl-C
            _signal_group(self._running.process, signal.SIGKILL)
            self._running.process.wait()
            self._running.output.close()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)

"""Deadlines for the checks of `holdfast doctor RUN`: a disk that hangs holds no check back.

A call that the kernel does not answer cannot be interrupted, and a process with such a thread
cannot end. So each check runs in a fork of this process, which is left behind at the deadline.
"""

from __future__ import annotations

import os
import pickle
import select
import shlex
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from holdfast.doctor.checks import Check
from holdfast.report.formatting import format_duration

QUICK_S = 20.0  # Seconds for a check that reads a few small files
SLOW_S = 120.0  # Seconds for a check that waits on purpose, or measures a store
AFTER_HANG_S = 5.0  # Seconds for each check once one has hung: the next ones touch the same disk
_READ_BYTES = 1 << 16

T = TypeVar("T")
D = TypeVar("D")


class HungError(Exception):
    """A check has not ended within its deadline."""


@dataclass
class Deadlines:
    """Runs checks, each with a deadline, and notes those that hang in `hung`.

    where: the folder that the checks look at.
    """

    where: Path
    hung: list[Check] = field(default_factory=list)

    def run(self, name: str, seconds: float, function: Callable[[], T], default: D) -> T | D:
        """Return the result of a check that changes nothing in this process; `default` if it hangs.
        The result must be one that can be pickled."""
        if self.hung:
            seconds = min(seconds, AFTER_HANG_S)
        try:
            return call_in_fork(function, seconds)
        except HungError:
            found = f"no answer in {format_duration(seconds)}: the disk or network under it hangs"
            command = shlex.join(["stat", "-f", str(self.where)])
            remedy = f"mount the folder again, or wait until this returns: {command}"
            self.hung.append(Check(name, "fails", found, remedy, str(self.where)))
            return default


def call_in_fork(function: Callable[[], T], seconds: float) -> T:
    """Call a function in a fork of this process, and return its result. Raises HungError after
    `seconds`, and what the function raises."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(function, writer)
    os.close(writer)
    try:
        data = _read_all(reader, time.monotonic() + seconds)
    except HungError:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)  # it ends when the kernel returns
        raise
    finally:
        os.close(reader)
    os.waitpid(child, 0)
    result, error = pickle.loads(data)
    if error is not None:
        raise error
    found: T = result
    return found


def _answer(function: Callable[[], object], writer: int) -> None:
    """In the child: write result and error into the pipe, and end."""
    try:
        try:
            data = pickle.dumps((function(), None))
        except BaseException as error:
            data = pickle.dumps((None, error))
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(data)
    finally:
        os._exit(0)


def _read_all(reader: int, deadline: float) -> bytes:
    """Read a pipe up to its end. Raises HungError at the deadline."""
    parts: list[bytes] = []
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise HungError
        part = os.read(reader, _READ_BYTES)
        if not part:
            return b"".join(parts)
        parts.append(part)

"""Output of the node's processes: through a pipe into the agent, and from there into `logs/`.

A worker that holds state must not write to a file system: the write fails on a full disk, and waits
on one that hangs. So standard output and error of every child are the write end of a pipe. The
agent reads the pipe and keeps the last lines of each process in memory. One thread writes to the
files.

What cannot be written waits up to `MAX_WAITING_BYTES` for each process; beyond that the oldest
output is dropped. The file says how many bytes are missing, once it can be written again.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from holdfast.wire.process_log import message_of

MAX_WAITING_BYTES = 1 << 20
TAIL_BYTES = 8192
PIPE_BYTES = 1 << 20
"""Bytes that a child can write while the agent is suspended."""
CLOSE_TIMEOUT_S = 2.0
_READ_BYTES = 1 << 16
_F_SETPIPE_SZ = 1031  # F_SETPIPE_SZ of Linux


class ProcessOutput:
    """The output of one process. Belongs to the event loop, except for what waits to be written."""

    def __init__(self, log: Path, read_fd: int, relay: OutputRelay) -> None:
        self.path, self._read_fd, self._relay = log, read_fd, relay
        self._tail = b""
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Path, bytes]] = deque()
        self.waiting_bytes = 0  # that wait to be written
        self.dropped_bytes = 0  # that no file has taken, and that no file tells of yet

    def send_to(self, log: Path) -> None:
        """Write what follows into another file, which exists from now on."""
        self.path = log
        self._keep(b"")
        self._relay.wake(self)

    def last_lines(self, count: int) -> str:
        """Return the last messages of the process, as a user reads them."""
        self._read_all()
        return _last_messages(self._tail, count)

    def close(self) -> None:
        """Take the rest of the output, and read no more."""
        self._read_all()
        if self._read_fd >= 0:
            asyncio.get_running_loop().remove_reader(self._read_fd)
            os.close(self._read_fd)
            self._read_fd = -1
            self._relay.forget(self)

    def on_readable(self) -> None:
        """Take a piece of what the pipe holds; close it at its end."""
        if self._read_piece() == b"":
            self.close()

    def take_waiting(self) -> tuple[list[tuple[Path, bytes]], int]:
        """Return what is to be written, and the number of bytes that were dropped before it."""
        with self._lock:
            if not self._waiting:  # the next output comes with the number of bytes
                return [], 0
            waiting, dropped = list(self._waiting), self.dropped_bytes
            self._waiting.clear()
            self.waiting_bytes = self.dropped_bytes = 0
        return waiting, dropped

    def on_not_written(self, size: int) -> None:
        """Count bytes that no file has taken."""
        with self._lock:
            self.dropped_bytes += size

    def _read_all(self) -> None:
        while self._read_fd >= 0 and self._read_piece():
            pass

    def _read_piece(self) -> bytes | None:
        """Take one piece of output; return b"" at the end of the pipe, None if it is empty now."""
        try:
            data = os.read(self._read_fd, _READ_BYTES)
        except BlockingIOError:
            return None
        if data:
            self._tail = (self._tail + data)[-TAIL_BYTES:]
            self._keep(data)
            self._relay.wake(self)
        return data

    def _keep(self, data: bytes) -> None:
        with self._lock:
            self._waiting.append((self.path, data))
            self.waiting_bytes += len(data)
            while self.waiting_bytes > MAX_WAITING_BYTES:
                _, oldest = self._waiting.popleft()
                self.waiting_bytes -= len(oldest)
                self.dropped_bytes += len(oldest)


class OutputRelay:
    """Pipes for the processes of one agent, and the thread that writes what they say.

    Lives in one event loop, apart from the thread.
    """

    def __init__(self) -> None:
        self._ready: queue.SimpleQueue[ProcessOutput | None] = queue.SimpleQueue()
        self._open_outputs: set[ProcessOutput] = set()
        self._writer = threading.Thread(target=self._write, name="output", daemon=True)
        self._writer.start()

    def open(self, log: Path) -> tuple[int, ProcessOutput]:
        """Make a pipe; return its write end, which the caller closes, and what reads it."""
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read_fd, False)
        if sys.platform == "linux":
            with suppress(OSError):  # a limit of this user: then it has the usual 64 KiB
                fcntl.fcntl(write_fd, _F_SETPIPE_SZ, PIPE_BYTES)
        output = ProcessOutput(log, read_fd, self)
        self._open_outputs.add(output)
        asyncio.get_running_loop().add_reader(read_fd, output.on_readable)
        output.send_to(log)
        return write_fd, output

    def wake(self, output: ProcessOutput) -> None:
        """Have the thread write what waits of this process."""
        self._ready.put(output)

    def forget(self, output: ProcessOutput) -> None:
        """Note that a process will say no more."""
        self._open_outputs.discard(output)

    async def close(self) -> None:
        """Take what the processes have said, and write it, for `CLOSE_TIMEOUT_S` at most."""
        for output in tuple(self._open_outputs):
            output.close()
        self._ready.put(None)
        await asyncio.to_thread(self._writer.join, CLOSE_TIMEOUT_S)

    def _write(self) -> None:
        while (output := self._ready.get()) is not None:
            waiting, dropped = output.take_waiting()
            if not waiting:
                continue
            note = (
                f"({dropped} bytes of output could not be written)\n".encode() if dropped else b""
            )
            if not _append(waiting, note):
                output.on_not_written(dropped + sum(len(data) for _, data in waiting))


def make_log_folder(folder: Path) -> None:
    """Make `logs/` of a run folder, or a generation's folder in it. Raises OSError.

    The run folder itself stays missing. It may have been moved away, and a new one in its place
    would keep it from coming back."""
    if folder.name != "logs" and not folder.exists():
        folder.parent.mkdir(exist_ok=True)
    folder.mkdir(exist_ok=True)


def _last_messages(tail: bytes, count: int) -> str:
    lines = [message_of(line.rstrip()) for line in tail.decode("utf-8", "replace").splitlines()]
    return "\n".join([line for line in lines if line.strip()][-count:])


def _append(pieces: Sequence[tuple[Path, bytes]], note: bytes) -> bool:
    """Append pieces to their files; return False if that is not possible now."""
    try:
        for log, data in pieces:
            make_log_folder(log.parent)
            with log.open("ab", buffering=0) as file:
                file.write(note + data)
            note = b""
    except OSError:
        return False
    return True

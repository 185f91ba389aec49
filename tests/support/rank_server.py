"""The fork server behind `tests/support/ranks.py`: one process, one loop, no threads.

It answers one JSON line per connection. A request waits in one queue until its ranks fit under the
bound. The queue is first come, first served: small requests do not overtake a large one, so it
cannot starve. Every rank is a session and process group of its own. A job ends all of them when its
deadline is over, when its client has exited, or shortly after one of its ranks failed.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from holdfast.wire import process_log
from tests.support.ranks import MAX_RANKS, RankContext, decode, encode

PRELOAD = (
    "numpy",
    "pytest",
    "pydantic",
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.device_mesh",
    "torch._dynamo",
    "torch.distributed.tensor.debug",
    "torch.nn.parallel",
    "numpy.random",
    "hypothesis",
    "holdfast.training.recover.recover",
    "holdfast.training.engine.runner",
    "holdfast.checkpoint.capture.capturer",
    "holdfast.model.huggingface",
    "holdfast.elastic.worker.main",
    "tests.support.layouts",
    "tests.support.mover_process",
)
GRACE = 3.0  # seconds that peers get after a rank failed
DUMP = 0.5  # seconds between asking for stack traces and killing
PR_SET_PDEATHSIG = 1


@dataclass
class Job:
    connection: socket.socket
    request: dict[str, Any]
    pids: dict[int, int] = field(default_factory=dict)  # pid -> rank, those still alive
    ended: dict[int, tuple[int, str]] = field(default_factory=dict)
    end: float = float("inf")  # monotonic time of the next measure against its ranks
    reason: str = "deadline"
    dumped: bool = False


class RankServer:
    def __init__(self, listener: socket.socket, bare: bool = False) -> None:
        self.listener = listener
        self.queue: list[Job] = []
        self.running: list[Job] = []
        self.buffers: dict[socket.socket, bytes] = {}
        self.preloaded = bare
        self.selector = selectors.DefaultSelector()
        self.wake, self.wake_writer = socket.socketpair()
        for each in (self.wake, self.wake_writer, listener):
            each.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_writer.fileno(), warn_on_full_buffer=False)
        self.selector.register(listener, selectors.EVENT_READ, "accept")
        self.selector.register(self.wake, selectors.EVENT_READ, "child")
        self.selector.register(0, selectors.EVENT_READ, "owner")

    def serve(self) -> None:
        """Until standard input ends, which is when pytest does."""
        while True:
            first = min((job.end for job in self.running), default=float("inf"))
            wait = None if first == float("inf") else max(0.0, first - time.monotonic())
            for key, _ in self.selector.select(wait):
                if key.data == "owner" and not os.read(0, 1024):
                    for job in self.running:
                        self._kill(job)
                    return
                if key.data == "accept":
                    self._accept()
                elif key.data == "child":
                    with contextlib.suppress(BlockingIOError):
                        self.wake.recv(4096)
                elif isinstance(key.fileobj, socket.socket):
                    self._receive(key.fileobj)
            self._reap()
            self._enforce()
            self._start()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self.listener.accept()
            connection.setblocking(False)
            self.buffers[connection] = b""
            self.selector.register(connection, selectors.EVENT_READ, "client")

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._client_gone(connection)
            return
        self.buffers[connection] += data
        if self.buffers[connection].endswith(b"\n"):
            self.queue.append(Job(connection, json.loads(self.buffers[connection])))

    def _client_gone(self, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        self.buffers.pop(connection)
        connection.close()
        self.queue = [job for job in self.queue if job.connection is not connection]
        for job in self.running:
            if job.connection is connection:
                self._kill(job)

    def _start(self) -> None:
        """Fork the ranks of every job at the head of the queue that fits under the bound, or that
        would be alone."""
        while self.queue:
            busy = sum(len(job.pids) for job in self.running)
            if busy and busy + self.queue[0].request["n"] > MAX_RANKS:
                return
            job = self.queue.pop(0)
            try:
                self._preload()
            except Exception:
                self._answer(job, {"error": traceback.format_exc()})
                continue
            for rank in range(job.request["n"]):
                pid = os.fork()
                if pid == 0:
                    self._become_rank(job, rank)
                job.pids[pid] = rank
            job.end = time.monotonic() + job.request["deadline"]
            self.running.append(job)

    def _preload(self) -> None:
        """Import once what every rank needs. Forking is only safe while there is one thread."""
        if self.preloaded:
            return
        for name in PRELOAD:
            importlib.import_module(name)
        _rewrite_asserts()
        import torch

        torch.set_num_threads(1)
        threads = len(os.listdir("/proc/self/task"))
        if threads != 1:
            raise RuntimeError(f"the imports left {threads} threads running; forking is not safe")
        gc.collect()
        gc.freeze()  # a collection in a child would copy every page
        self.preloaded = True

    def _become_rank(self, job: Job, rank: int) -> NoReturn:
        """In the child: never returns to the server's loop."""
        try:
            os.setsid()
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.selector.close()
            for each in (self.listener, self.wake, self.wake_writer, *self.buffers):
                each.close()
            _run(job.request, rank)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(70)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for job in list(self.running):
                if pid in job.pids:
                    self._rank_ended(job, pid, os.waitstatus_to_exitcode(status))

    def _rank_ended(self, job: Job, pid: int, code: int) -> None:
        rank = job.pids.pop(pid)
        _kill_group(pid)  # what it started and left behind
        by_us = job.dumped and code == -signal.SIGKILL
        job.ended[rank] = (code, job.reason if by_us else "")
        if code != 0 and rank not in job.request["dies"] and not job.dumped:
            grace = time.monotonic() + GRACE
            if grace < job.end:
                job.end, job.reason = grace, "peer failed"
        if not job.pids:
            self.running.remove(job)
            self._answer(job, {"ended": [job.ended[r] for r in range(job.request["n"])]})

    def _enforce(self) -> None:
        """Past its time a job first writes its stacks into its logs, then it is killed."""
        now = time.monotonic()
        for job in self.running:
            if now < job.end:
                continue
            if job.dumped:
                self._kill(job)
                job.end = float("inf")
            else:
                job.dumped, job.end = True, now + DUMP
                for pid in job.pids:
                    os.kill(pid, signal.SIGUSR2)

    def _kill(self, job: Job) -> None:
        for pid in job.pids:
            _kill_group(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # not yet a group of its own

    def _answer(self, job: Job, answer: dict[str, Any]) -> None:
        if job.connection not in self.buffers:
            return  # the client has exited
        with contextlib.suppress(OSError):
            job.connection.sendall(json.dumps(answer).encode() + b"\n")


def _run(request: dict[str, Any], rank: int) -> NoReturn:
    """Redirect output to the rank's log, run the body, leave its value, exit."""
    folder = Path(request["folder"])
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    process_log.start("worker", sys.stdout, rank=rank)
    pid_file = folder / f".rank{rank}.pid"
    pid_file.write_text(str(os.getpid()))
    pid_file.rename(folder / f"rank{rank}.pid")
    code = 1
    try:
        body = getattr(importlib.import_module(request["module"]), request["function"])
        body = getattr(body, "rank_body", body)
        context = RankContext(rank, request["n"], folder)
        value = body(context, **decode(request["args"]))
        (folder / f"rank{rank}.result").write_text(json.dumps(encode(value)))
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:
        traceback.print_exc()
    process_log.stop()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # destructors of half-dead process groups are no part of a test


def _rewrite_asserts() -> None:
    """A failing assert in a rank shows its values, as it would in the test's own process."""
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config

    config = get_config()
    config.parse(["--noconftest", "-p", "no:xdist", "-p", "no:cacheprovider"])
    install_importhook(config)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    RankServer(socket.socket(fileno=int(sys.argv[1])), bare="bare" in sys.argv[3:]).serve()

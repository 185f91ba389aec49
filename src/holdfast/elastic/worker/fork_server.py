"""The fork server: a process that has imported torch and touched no device, and is forked.

    python -m holdfast.elastic.worker.fork_server --control FD --lifeline FD --entry MODULE:FUNCTION
        [--run NAME] [--reference] [--path FOLDER ...] [MODULE ...]

Imports are most of a worker's start, so they happen once, here; a worker is a fork away (a few
milliseconds). The fork server itself has one thread. A fork copies only the calling thread, and a
lock that another thread held would stay locked for ever in the child.

`elastic/protocol/fork_channel.py` has the orders that it takes on the control socket, and what it
reports there.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from holdfast.elastic.protocol import exit_codes
from holdfast.elastic.protocol.fork_channel import (
    ForkEvent,
    ForkServerReady,
    ForkWorker,
    KillWorkers,
    LineDecoder,
    WorkerExited,
    WorkerForked,
    encode_message,
    parse_fork_order,
    receive_messages,
)
from holdfast.elastic.protocol.worker_spec import DEFAULT_ENTRY, WorkerSpec
from holdfast.errors import UserError
from holdfast.wire import lifeline, process_log
from holdfast.wire.process_title import set_process_title
from holdfast.wire.secret import Secret

logger = logging.getLogger("holdfast.elastic.worker.fork_server")  # it runs as __main__

Entry = Callable[[WorkerSpec, Secret], int]
"""A worker's main function: returns its exit code (`elastic.protocol.exit_codes`)."""

# The imports of any worker. The entry's module brings the rest, and the arguments name further
# ones.
_PRELOADED_MODULES = ("torch", "torch.distributed")


class ForkServerLoop:
    """Forks workers, reaps them, reports to the agent."""

    def __init__(
        self, control: socket.socket, lifeline_fd: int, entry: Entry, reference: str = ""
    ) -> None:
        """reference: the checksum of the computation below, for the agent."""
        self._reference = reference
        self._control = control
        self._lifeline = lifeline_fd
        self._entry = entry
        self._lines = LineDecoder(parse_fork_order)
        self._output_fds: deque[int] = deque()  # of workers that are not forked yet
        self._ranks_by_pid: dict[int, int] = {}  # pid -> rank
        self._wake_read_fd, self._wake_write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def run(self) -> None:
        """Serve until the agent exits."""
        # A child's end writes a byte into the pipe: noticed at once, without polling.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write_fd, warn_on_full_buffer=False)
        with selectors.PollSelector() as selector:  # no descriptor of its own to leak into forks
            for source in (self._control, self._wake_read_fd, self._lifeline):
                selector.register(source, selectors.EVENT_READ)
            self._send(ForkServerReady(os.getpid(), self._reference))
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._lifeline in ready:
                    lifeline.exit_now()
                if self._wake_read_fd in ready:
                    os.read(self._wake_read_fd, 4096)
                    self._reap()
                if self._control in ready:
                    received = receive_messages(self._control, self._lines)
                    if received is None:
                        return
                    orders, descriptors = received
                    self._output_fds += descriptors
                    for order in orders:
                        match order:
                            case ForkWorker(spec, secret):
                                self._fork(spec, Secret.from_hex(secret))
                            case KillWorkers():
                                for pid in self._ranks_by_pid:
                                    self._kill_group(pid)

    def _fork(self, spec: WorkerSpec, secret: Secret) -> None:
        spec = replace(spec, forked=time.monotonic())
        output_fd = self._output_fds.popleft()
        pid = os.fork()
        if pid == 0:
            self._become_worker(spec, secret, output_fd)
        os.close(output_fd)
        with suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)  # whichever of the two comes first, the group exists from here on
        self._ranks_by_pid[pid] = spec.rank
        self._send(WorkerForked(spec.rank, pid))

    def _become_worker(self, spec: WorkerSpec, secret: Secret, output_fd: int) -> None:
        """Run the worker, in the child; never return."""
        code = exit_codes.CRASHED
        try:
            with suppress(PermissionError):  # the parent may have made the group already
                os.setpgid(0, 0)
            # Ignore the signals of a terminal and of a scheduler that warns every process of a job.
            # The agent handles these signals; a worker leaves when its agent asks it to.
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            lifeline.ignore_agent_signals()
            role = "standby" if spec.rank < 0 else f"worker {spec.rank}"
            set_process_title(role, str(spec.config.get("name", "")))
            redirect_output(output_fd)
            for other_fd in self._output_fds:
                os.close(other_fd)
            process_log.start("worker", sys.stdout, generation=spec.generation, rank=spec.rank)
            self._control.close()
            os.close(self._wake_read_fd)
            os.close(self._wake_write_fd)
            # The kernel's signal is for a worker whose interpreter is stuck; see `lifeline`.
            lifeline.watch_lifeline(self._lifeline)
            _configure_process(spec)
            code = self._entry(spec, secret)
        except UserError as error:
            logger.error("%s", error)
            code = exit_codes.USER_ERROR
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else exit_codes.CRASHED
        except BaseException:
            logger.exception("the worker failed")
        finally:
            _exit_now(code)  # an interpreter's shutdown could wait for threads of a broken group

    def _kill_group(self, pid: int) -> None:
        """Kill a worker and what it started. A child that is not reaped yet keeps its number, so
        this cannot hit a stranger."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)

    def _reap(self) -> None:
        for pid in list(self._ranks_by_pid):
            try:
                ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                ended = None
            if ended is None:
                continue
            # before the number is free: processes that the worker left behind
            self._kill_group(pid)
            _, status = os.waitpid(pid, 0)
            rank = self._ranks_by_pid.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            self._send(WorkerExited(rank, pid, code))

    def _send(self, message: ForkEvent) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the lifeline ends us next
            self._control.sendall(encode_message(message))


def _exit_now(code: int) -> NoReturn:
    """End this process without the interpreter's shutdown."""
    try:
        process_log.stop()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # whatever that raises without memory: a worker must not return into the fork server
        os._exit(code)


def _configure_process(spec: WorkerSpec) -> None:
    """Apply the settings that must come after the fork and before the first collective."""
    import torch

    torch.set_num_threads(spec.threads)
    # Named by the run file, not guessed; "=": this one, and none whose name begins so.
    os.environ["GLOO_SOCKET_IFNAME"] = spec.gloo_interface
    os.environ["NCCL_SOCKET_IFNAME"] = f"={spec.gloo_interface}"
    os.environ.setdefault("NCCL_RAS_ENABLE", "0")  # a listener that asks nobody for a proof


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--control", type=int, required=True)
    parser.add_argument("--lifeline", type=int, required=True)
    parser.add_argument("--entry", default=DEFAULT_ENTRY)
    parser.add_argument("--path", action="append", default=[])
    parser.add_argument("--run", default="")
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("preloads", nargs="*")
    arguments = parser.parse_args()
    # The entry's module may lie there, if it is not ours.
    sys.path.extend(path for path in arguments.path if path not in sys.path)
    lifeline.arm_kernel_kill(arguments.lifeline)
    set_process_title("fork server", arguments.run)
    lifeline.ignore_agent_signals(signal.SIGTERM)  # by which the agent stops it until it serves
    gc.disable()  # what imports make stays, and it would go through that again and again
    for name in (*_PRELOADED_MODULES, *arguments.preloads):
        importlib.import_module(name)
    # The function that `module:function` names.
    module, _, function = arguments.entry.partition(":")
    entry: Entry = getattr(importlib.import_module(module), function)
    reference = compute_in_child() if arguments.reference else ""
    # Freeze for good: a child's collector must not touch, and so copy, inherited objects. Nor may
    # it look through them (a third of a second) whenever it collects.
    gc.freeze()
    gc.enable()
    lifeline.ignore_agent_signals()  # from here on it ends when its control socket does
    ForkServerLoop(
        socket.socket(fileno=arguments.control), arguments.lifeline, entry, reference
    ).run()
    # taking apart all that imports made lasts half a second: the agent waits
    _exit_now(exit_codes.DONE)


def redirect_output(pipe_fd: int) -> None:
    """Make `pipe_fd` standard output and error, and take input from nowhere. Closes `pipe_fd`."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(nothing, 0)
    os.dup2(pipe_fd, 1)
    os.dup2(pipe_fd, 2)
    os.close(pipe_fd)
    os.close(nothing)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True)


# A computation of some milliseconds whose checksum tells whether two nodes give the same bits.
#
# It runs in a child of the fork server, so that the fork server itself never computes.

DIGEST_BYTES = 8


def reference_checksum() -> str:
    """Return the checksum of matrix products, norms, exponentials and sums, in fp32 and bf16."""
    import torch
    from torch.nn import functional

    torch.set_num_threads(1)
    numbers = torch.arange(96 * 128, dtype=torch.int64) * 2654435761 % (1 << 24)
    x = (numbers.to(torch.float32) / (1 << 23) - 1).reshape(96, 128).requires_grad_()
    w = (numbers.flip(0).to(torch.float32) / (1 << 23) - 1).reshape(128, 96).requires_grad_()
    hidden = functional.silu(x @ w)
    weights = torch.softmax(functional.layer_norm(hidden, (96,)), dim=-1)
    loss = (weights * hidden).sum() + torch.rsqrt(hidden.square().mean() + 1e-5)
    gradients = torch.autograd.grad(loss, (x, w))
    half = x.detach().bfloat16() @ w.detach().bfloat16()
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for tensor in (weights.detach(), loss.detach(), *gradients, half.float()):
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def compute_in_child(compute: Callable[[], str] = reference_checksum) -> str:
    """Return the checksum, computed in a forked child; "" if the child fails."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write_end, compute().encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as answer:
        found = answer.read()
    os.waitpid(pid, 0)
    return found.decode()


if __name__ == "__main__":
    main()

"""The agent's own children, started by module name: the fork server and the mover.

Both get the read end of the lifeline. Both are in sessions of their own, so that Ctrl-C in the
terminal reaches the agent alone. Their arguments and environment hold no secrets.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.core.json_parsing import parse_json
from holdfast.elastic.node.output_relay import OutputRelay, ProcessOutput
from holdfast.elastic.protocol.fork_channel import (
    ForkOrder,
    ForkServerReady,
    ForkWorker,
    KillWorkers,
    LineDecoder,
    WorkerExited,
    WorkerForked,
    encode_message,
    parse_fork_event,
)
from holdfast.elastic.protocol.worker_spec import WorkerSpec
from holdfast.errors import HoldfastError
from holdfast.wire.child_command import module_command, paths_for
from holdfast.wire.secret import Secret

CHILD_START_TIMEOUT_S = 180.0
"""Seconds that a fork server gets to import torch: few if the machine is quiet, far more if it is
cold or busy."""

SEND_RETRY_S = 0.01
"""Seconds until a message is sent again to a fork server that has not read the one before."""


class ChildFailedError(HoldfastError):
    """A child did not start; the message ends with the last lines of its log."""


class Child:
    """One running child process: its output goes to the agent, its exit is reported once."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        output: ProcessOutput,
        on_exit: Callable[[], None],
    ) -> None:
        self.name = name
        self.process = process
        self.output = output
        self._exit_task = asyncio.create_task(self._wait_for_exit(on_exit))
        self._exit_task.add_done_callback(_tell_fault)

    async def _wait_for_exit(self, on_exit: Callable[[], None]) -> None:
        await self.process.wait()
        on_exit()

    @property
    def is_alive(self) -> bool:
        return self.process.returncode is None

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Ask the child to exit; kill it after `timeout_s`. Its exit is not reported.

        A fork server that serves ignores the signal: it exits when its control socket closes.
        """
        self._exit_task.cancel()
        with suppress(ProcessLookupError):
            self.process.terminate()
        try:
            async with asyncio.timeout(timeout_s):
                await self.process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()

    def start_error(self) -> ChildFailedError:
        words = self.output.last_lines(3)
        return ChildFailedError(f"the {self.name} did not start: {words or 'it said nothing'}")


@dataclass(frozen=True)
class ForkServerSettings:
    """What a fork server is started with.

    entry: a worker's main function.
    preloads: further modules that it needs.
    lifeline: descriptor that ends every child when the agent exits.
    log: gets the fork server's output.
    """

    entry: str
    preloads: Sequence[str]
    lifeline: int
    log: Path
    secret: Secret
    run: str = ""  # its name, for the titles of processes
    computes_reference: bool = False  # the reference checksum of this node
    environment: Mapping[str, str] = field(default_factory=dict)  # in addition to the agent's


class ForkServer(Child):
    """The fork server and its control socket."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        output: ProcessOutput,
        on_exit: Callable[[], None],
        control: socket.socket,
        on_message: Callable[[WorkerForked | WorkerExited], None],
    ) -> None:
        super().__init__("fork server", process, output, on_exit)
        self._control = control
        self._line_decoder = LineDecoder(parse_fork_event)
        self.reference = ""
        """Checksum of its reference computation; "" if it made none."""
        self._on_message = on_message
        self._is_control_open = True  # its end of the control socket is open
        self._ready, self._sending = asyncio.Event(), asyncio.Lock()
        asyncio.get_running_loop().add_reader(control.fileno(), self._read_messages)

    @staticmethod
    async def start(
        settings: ForkServerSettings,
        relay: OutputRelay,
        on_message: Callable[[WorkerForked | WorkerExited], None],
        on_exit: Callable[[], None],
    ) -> ForkServer:
        """Start a fork server. on_message: gets its messages about workers. on_exit: called when it
        has exited."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            process, output = await _spawn(
                module_command(
                    "holdfast.elastic.worker.fork_server",
                    "--control",
                    str(theirs.fileno()),
                    "--lifeline",
                    str(settings.lifeline),
                    "--entry",
                    settings.entry,
                    f"--run={settings.run}",
                    *(["--reference"] if settings.computes_reference else []),
                    *(f"--path={path}" for path in paths_for(settings.entry)),
                    *settings.preloads,
                ),
                relay,
                settings.log,
                (theirs.fileno(), settings.lifeline),
                environment=settings.environment,
            )
        return ForkServer(process, output, on_exit, ours, on_message)

    async def wait_until_ready(self) -> None:
        """Wait until it has imported all that workers need. Raises ChildFailedError."""
        await _wait_unless_ended(self._ready.wait(), self.process, self)

    async def fork(self, spec: WorkerSpec, secret: Secret, output_fd: int) -> None:
        """Ask for a fork, whose standard output and error are `output_fd`."""
        await self._send(ForkWorker(spec, secret.hex()), output_fd)

    async def kill_workers(self) -> None:
        """Kill every worker, including workers whose fork was requested and is not yet reported."""
        await self._send(KillWorkers())

    async def stop(self, timeout_s: float = 5.0) -> None:
        if self._is_control_open:
            self._is_control_open = False
            asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._control.close()
        await super().stop(timeout_s)

    async def _send(self, message: ForkOrder, *fds: int) -> None:
        data, loop = encode_message(message), asyncio.get_running_loop()
        with suppress(BrokenPipeError, ConnectionResetError):  # its end is told by `gone`
            async with self._sending:
                sent = 0
                while fds and not sent:  # descriptors travel with the first byte
                    try:
                        sent = socket.send_fds(self._control, [data], fds)
                    except BlockingIOError:
                        await asyncio.sleep(SEND_RETRY_S)
                await loop.sock_sendall(self._control, data[sent:])

    def drain_messages(self) -> None:
        """Read the messages that it sent before it exited."""
        while self._is_control_open and self._read_messages():
            pass

    def _read_messages(self) -> bool:
        """Read and dispatch what the socket holds; return False if it holds nothing."""
        try:
            data = self._control.recv(1 << 16)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            data = b""
        if not data:
            self._is_control_open = False
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            return False
        for message in self._line_decoder.feed(data):
            if isinstance(message, ForkServerReady):
                self.reference = message.reference
                self._ready.set()
            else:
                self._on_message(message)
        return True


async def start_mover(
    line: bytes, lifeline: int, relay: OutputRelay, log: Path, on_exit: Callable[[], None]
) -> Child:
    """Start the mover; `line` (its MoverSpec) goes to its standard input, and nowhere else.

    Raises ChildFailedError if it does not report that it listens.
    """
    command = module_command("holdfast.checkpoint.mover.main")
    process, output = await _spawn(command, relay, log, (lifeline,), use_pipes=True)
    mover = Child("mover", process, output, on_exit)
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(line)
        await process.stdin.drain()
        process.stdin.close()
    answer = await _wait_unless_ended(process.stdout.readline(), process, mover)
    try:
        ready = bool(parse_json(answer)["ready"])
    except (ValueError, KeyError, TypeError):
        ready = False
    if not ready:
        await mover.stop(0.0)
        raise mover.start_error()
    return mover


async def _spawn(
    command: Sequence[str],
    relay: OutputRelay,
    log: Path,
    fds: Sequence[int],
    use_pipes: bool = False,
    environment: Mapping[str, str] | None = None,
) -> tuple[asyncio.subprocess.Process, ProcessOutput]:
    environment = {**os.environ, **(environment or {})}
    # A pool of threads that exists before a fork is lost in it; workers set their own number.
    environment["OMP_NUM_THREADS"] = "1"
    # A thread that spins at a barrier takes the core of the worker it waits for.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    pipe = asyncio.subprocess.PIPE
    nothing = asyncio.subprocess.DEVNULL
    output_fd, output = relay.open(log)
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=pipe if use_pipes else nothing,
            stdout=pipe if use_pipes else output_fd,
            stderr=output_fd,
            env=environment,
            pass_fds=tuple(fds),
            start_new_session=True,
        )
    finally:
        os.close(output_fd)
    return process, output


async def _wait_unless_ended(
    awaitable: Any, process: asyncio.subprocess.Process, child: Child
) -> Any:
    """Return the result of `awaitable`. If the process exits or CHILD_START_TIMEOUT_S pass first,
    raise ChildFailedError."""
    task = asyncio.ensure_future(awaitable)
    end = asyncio.ensure_future(process.wait())
    done, _ = await asyncio.wait(
        {task, end}, timeout=CHILD_START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
    )
    end.cancel()
    if task not in done:
        task.cancel()
        if child.is_alive:
            process.send_signal(signal.SIGKILL)
        raise child.start_error()
    return task.result()


def _tell_fault(task: asyncio.Task[None]) -> None:
    """Log a fault of the exit callback at once: the task itself is never awaited."""
    if not task.cancelled() and (error := task.exception()) is not None:
        told = {"message": "a fault at the end of a child", "exception": error, "task": task}
        task.get_loop().call_exception_handler(told)

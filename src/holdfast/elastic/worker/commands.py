"""The commands of a worker's agent, fetched by a long poll.

One thread polls. `begin` and `end` wait for the training thread, which fetches them after it has
stopped (`wait_for_command`). `halt` does not wait: the polling thread wakes the training thread
from any blocking call. A command is kept as a number: all generations up to it have ended. So
nothing has to be reset for the next generation, and a late halt only concerns the past. If the
training thread cannot be woken (`elastic/worker/stuck_threads.py`), the process exits.

If the agent is out of reach, the thread retries. If the agent has exited, the lifeline ends this
process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from holdfast.elastic.protocol import exit_codes
from holdfast.elastic.protocol.worker_commands import (
    COMMANDS_PATH,
    Begin,
    CommandPoll,
    CommandReply,
    End,
    Halt,
)
from holdfast.elastic.protocol.worker_messages import MAX_POLL_WAIT_S
from holdfast.elastic.worker.stuck_threads import StackDumpTimer, ThreadId, is_any_stuck
from holdfast.errors import HoldfastError
from holdfast.policy.recovery.survivors import HeldState
from holdfast.wire import process_log
from holdfast.wire.http.client import Client
from holdfast.wire.secret import Secret

logger = logging.getLogger(__name__)

_SECOND_WAKEUP_AFTER_S = 2.0
"""Seconds after the first wake-up before a training thread that still blocks is woken by all means.
"""
_STUCK_AFTER_S = 1.0
"""A thread still blocked this many seconds after all connections closed will never return."""
_STACK_DUMP_AFTER_S = 5.0
"""Seconds after a halt before a process that has not stopped dumps its threads' stacks.

After `elastic.node.node_runner.WORKER_HALT_TIMEOUT_S` and three of its steps it is killed. Without
the dump the cause would be unknown.
"""
_RETRY_DELAY_S = 0.1  # seconds before an agent that did not answer is asked again

Interrupt = Callable[[bool], None]
"""Wakes the training thread, wherever it blocks: between replicas, and with True inside its own.
Called a second time if that was not enough."""


class HaltedError(HoldfastError):
    """Raised in the training thread between two operations: its generation was halted."""


class CommandClient:
    """Polls from `start` on. Only the training thread may call `wait_for_command` and
    `interruptible`."""

    def __init__(self, agent: str, secret: Secret, pid: int | None = None) -> None:
        self._agent, self._secret = agent, secret
        self._pid = os.getpid() if pid is None else pid
        self._changed = threading.Condition()
        self._client = Client(agent, secret)
        self._held_state: HeldState | None = None
        self._last_number = 0
        self._is_idle = False  # the training thread waits for orders
        self._is_closed = False
        self._ended_up_to: float = 0  # generations up to this one have been ended
        self._pending_command: Begin | End | None = None
        self._interrupt_lock = threading.Lock()  # held while an interrupt runs
        self._waking_thread: ThreadId | None = None  # the thread that runs one
        # who was to be woken waits for nothing but the end of an interrupt
        self._has_returned = False
        self._interrupt: Interrupt | None = None
        self._interrupt_generation = 0  # that the interrupt is of
        self._exits_if_stuck = False
        self._training_thread = ThreadId.current()  # the thread that is woken
        self._stack_dump = StackDumpTimer(_STACK_DUMP_AFTER_S)
        self._thread = threading.Thread(target=self._ask_until_closed, name="orders", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop polling."""
        with self._changed:
            self._is_closed = True
            client = self._client
            self._changed.notify_all()
        client.abort()
        self._thread.join()

    # --- calls of the training thread -----------------------------------------------------
    def is_halted(self, generation: int) -> bool:
        """Return True if this generation has been ended."""
        return self._ended_up_to >= generation

    def check_halted(self, generation: int) -> None:
        """Raise HaltedError if this generation has been ended."""
        if self.is_halted(generation):
            raise HaltedError(f"generation {generation} was halted")

    def wait(self, generation: int, wait_s: float) -> None:
        """Wait `wait_s` seconds; raise HaltedError at once if the generation is ended meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_halted(generation), wait_s)
        self.check_halted(generation)

    @contextmanager
    def interruptible(
        self, generation: int, interrupt: Interrupt, *, exits_if_stuck: bool = False
    ) -> Iterator[None]:
        """Allow a halt of `generation` to call `interrupt` on the polling thread while this is
        open.

        When the block is left, no interrupt runs any more. exits_if_stuck: if nothing can wake the
        thread, its process exits. Raises HaltedError if there was a halt before.
        """
        with self._interrupt_lock:
            self.check_halted(generation)
            self._exits_if_stuck, self._has_returned = exits_if_stuck, False
            self._interrupt_generation, self._interrupt = generation, interrupt
            self._training_thread = ThreadId.current()
        try:
            yield
        finally:
            self._has_returned = True
            with self._interrupt_lock:
                self._interrupt = None

    def wait_for_command(self, held_state: HeldState | None) -> Begin | End:
        """Report the state that this process holds, and wait for a command."""
        if held_state is not None:
            with self._changed:
                self._held_state = held_state
                client, self._client = self._client, Client(self._agent, self._secret)
            client.abort()  # the open question knows nothing of what is held
        with self._changed:
            self._is_idle = True
        self._stack_dump.cancel()
        with self._changed:
            self._changed.wait_for(lambda: self._pending_command is not None)
            orders, self._pending_command, self._held_state = self._pending_command, None, None
            self._is_idle = False
        assert orders is not None
        return orders

    # --- the other thread -----------------------------------------------------------------
    def _ask_until_closed(self) -> None:
        while not self._is_closed:
            with self._changed:
                client, held, seen = self._client, self._held_state, self._last_number
            poll = CommandPoll(self._pid, seen, held)
            try:
                answer = client.post(COMMANDS_PATH, poll.to_json(), MAX_POLL_WAIT_S + 10.0)
                self._apply_reply(CommandReply.from_json(answer))
            except HoldfastError:
                self._pause_unless_changed(client)
            except Exception as error:  # our own bug, or an answer of another version
                logger.warning("commands: %s: %s", type(error).__name__, error)
                threading.Event().wait(_RETRY_DELAY_S)

    def _pause_unless_changed(self, asked_client: Client) -> None:
        """Pause before the same request is repeated; return at once if there is a new one."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or self._client is not asked_client, _RETRY_DELAY_S
            )

    def _apply_reply(self, reply: CommandReply) -> None:
        command = reply.command
        over = 0 if command is None else command.ended_generation
        with self._changed:
            if reply.number <= self._last_number:
                return
            self._last_number = reply.number
            self._ended_up_to = max(self._ended_up_to, over)
            if isinstance(command, Halt):
                self._pending_command = None  # a halt takes back what was ordered before
            elif command is not None:
                self._pending_command = command
            busy = not self._is_idle
            self._changed.notify_all()
        if command is None:
            return
        inside = not isinstance(command, Halt) or command.is_inside_replica
        woken = threading.Event()
        with _exit_if_unable_to_halt():
            if isinstance(command, Halt) and busy:
                self._stack_dump.arm()
                if self._is_idle:  # it came back meanwhile
                    self._stack_dump.cancel()
            threading.Thread(
                target=self._escalate_wakeup, args=(over, inside, woken), name="halt", daemon=True
            ).start()
        self._run_interrupt(over, inside)
        woken.set()

    def _escalate_wakeup(
        self, ended_up_to: float, inside_replica: bool, first_wakeup_done: threading.Event
    ) -> None:
        """Escalate until the training thread returns: wait, then force the wake-up, then end the
        process.

        first_wakeup_done: set when the first wake-up call has returned. With many peers and few
        cores that takes long.
        """
        begun = time.monotonic()
        if inside_replica:
            first_wakeup_done.wait(_STUCK_AFTER_S)
            self._exit_if_stuck(ended_up_to, first_wakeup_done)
        threading.Event().wait(max(0.0, begun + _SECOND_WAKEUP_AFTER_S - time.monotonic()))
        if not first_wakeup_done.is_set():
            while self._still_blocked(ended_up_to) and not first_wakeup_done.wait(_RETRY_DELAY_S):
                self._exit_if_stuck(ended_up_to, first_wakeup_done)
            threading.Event().wait(_STUCK_AFTER_S)  # to come back in
        # not by this thread: if it got stuck, no thread would notice
        if self._still_blocked(ended_up_to):
            with _exit_if_unable_to_halt():
                again = threading.Thread(
                    target=self._run_interrupt, args=(ended_up_to, True), name="wake", daemon=True
                )
                again.start()
            again.join(_STUCK_AFTER_S)
        while self._may_be_stuck(ended_up_to):
            self._exit_if_stuck(ended_up_to, first_wakeup_done)

    def _still_blocked(self, ended_up_to: float) -> bool:
        """Return True if the training thread still blocks. Reads without the lock, as below."""
        return (
            not self._has_returned
            and self._interrupt is not None
            and self._interrupt_generation <= ended_up_to
        )

    def _exit_if_stuck(self, ended_up_to: float, first_wakeup_done: threading.Event) -> None:
        """End the process if a thread is stuck.

        The waking thread may itself be stuck, within gloo. A training thread that is not yet woken
        sleeps with good reason, so it does not count.
        """
        if not self._may_be_stuck(ended_up_to):
            return
        trains = self._training_thread if first_wakeup_done.is_set() else None
        threads = [each for each in (trains, self._waking_thread) if each is not None]
        if is_any_stuck(threads, _STUCK_AFTER_S) and self._may_be_stuck(ended_up_to):
            logger.error("stuck in a receive that cannot complete; exiting (lost its peers)")
            process_log.stop()
            os._exit(exit_codes.PEER_LOST)

    def _may_be_stuck(self, ended_up_to: float) -> bool:
        """Return True if a thread may be stuck. Reads without the lock, which a stuck thread may
        hold."""
        return (
            self._exits_if_stuck
            and self._interrupt is not None
            and self._interrupt_generation <= ended_up_to
        )

    def _run_interrupt(self, ended_up_to: float, inside_replica: bool) -> None:
        """Wake the training thread if it is in a generation up to `ended_up_to`; it may have left
        it long ago."""
        with self._interrupt_lock:
            interrupt = self._interrupt
            if interrupt is None or not self._still_blocked(ended_up_to):
                return
            self._waking_thread = ThreadId.current()
            try:
                interrupt(inside_replica)
            except Exception as error:  # what it woke may have ended under its hands
                logger.warning("commands: %s: %s", type(error).__name__, error)
            finally:
                self._waking_thread = None


@contextmanager
def _exit_if_unable_to_halt() -> Iterator[None]:
    """End the process if it cannot start a thread or allocate memory. The order to halt would be
    lost otherwise, and all other workers would wait for this one."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        try:
            logger.error("cannot halt: %s: %s", type(error).__name__, error)
            process_log.stop()
        finally:
            os._exit(exit_codes.CRASHED)


class GenerationHalts:
    """The halts of one generation, as its training thread sees them."""

    def __init__(self, commands: CommandClient, generation: int) -> None:
        self._commands, self._generation = commands, generation

    @property
    def is_halted(self) -> bool:
        return self._commands.is_halted(self._generation)

    def check(self) -> None:
        """Raise HaltedError if the agent has ended the generation."""
        self._commands.check_halted(self._generation)

    def wait(self, wait_s: float) -> None:
        """Wait as `CommandClient.wait` does."""
        self._commands.wait(self._generation, wait_s)

    def interruptible(
        self, interrupt: Interrupt, *, exits_if_stuck: bool = False
    ) -> AbstractContextManager[None]:
        """Allow a halt to call `interrupt`, as `CommandClient.interruptible` does."""
        return self._commands.interruptible(
            self._generation, interrupt, exits_if_stuck=exits_if_stuck
        )

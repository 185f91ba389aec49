"""Requests of workers and the agent to their node's mover. No torch.

Every call has its own connection. So threads may share a client, and a call that waits (events,
settle) does not delay other calls. A connection stays open for the next call while the client
exists.
"""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from holdfast.checkpoint.bucket.pending_upload import PendingUpload
from holdfast.checkpoint.memory.arena import SlotHeader
from holdfast.checkpoint.mover import messages
from holdfast.checkpoint.mover.messages import RestorePoint
from holdfast.checkpoint.mover.protocol import LineReader, encode_request, parse_answer, send_line
from holdfast.checkpoint.peers.config import Peer
from holdfast.checkpoint.peers.source import BlobHolder
from holdfast.core.format.manifest import Commit
from holdfast.core.json_parsing import Json, JsonMessage
from holdfast.core.sharding.state_table import StateTable
from holdfast.errors import HoldfastError
from holdfast.events import Event, event_from_json
from holdfast.layout import Topology
from holdfast.policy.saving.destinations import DURABLE, SaveDestinations
from holdfast.wire.secret import Secret

MOVER_ANSWER_TIMEOUT_S = 30.0
TRAINING_ANSWER_TIMEOUT_S = 10.0
"""Seconds for requests of a worker that trains or is about to end. A suspended mover must not delay
the worker; a busy mover answers within a second."""
RESTORE_SEARCH_TIMEOUT_S = 600.0
"""For looking through memory, peers and the run store; a mover that dies is noticed at once."""
FULL_READ_TIMEOUT_S = 6 * 3600.0
"""For reading every byte of a checkpoint."""
COMMIT_POLL_S = 5.0
"""Seconds that one request for a save's result waits. Between two requests, the caller can report
that it is alive."""


class MoverGoneError(HoldfastError):
    """The mover does not answer: it has ended, or is about to."""


@dataclass(frozen=True)
class Holdings:
    """A commit object and those of its blobs that the mover has in memory. slots: key -> the
    descriptor of the memory file, the slot, and the slot's header. The caller closes the
    descriptors."""

    commit: Commit
    slots: Mapping[str, tuple[int, int, SlotHeader]]
    peers: tuple[BlobHolder, ...] = ()  # where the other blobs lie


_Reply = TypeVar("_Reply", bound=JsonMessage)


class MoverClient:
    """Requests of one process in one generation.

    Every method raises MoverGoneError when the mover does not answer, FencedError when it serves a
    newer generation, CheckpointError and CorruptError as the mover does.
    """

    def __init__(
        self,
        socket_path: str,
        secret: Secret,
        generation: int,
        clock: Callable[[], float] = time.time,
        arena_wait_s: float = 0.0,
    ) -> None:
        """arena_wait_s: seconds that an arena request waits for the mover to learn of the
        generation."""
        self._socket_path, self._secret, self._clock = socket_path, secret, clock
        self._arena_wait_s = arena_wait_s
        self.generation = generation
        # append and pop are one step each, for any thread
        self._idle_connections: list[socket.socket] = []
        weakref.finalize(self, _close_all, self._idle_connections)

    # --- the agent's calls ------------------------------------------------------------------
    def expect(
        self,
        topology: Topology,
        table: StateTable,
        start_step: int | None = None,
        machines: Iterable[Peer] | None = None,
        sources: Iterable[Peer] = (),
        placement: Mapping[str, Sequence[str]] | None = None,
        restore_point: RestorePoint | None = None,
        is_from_store: bool = True,
    ) -> None:
        """Begin this client's generation: its writers, its tensors, and the step it starts from.
        Unfinished saves of older generations are refused. Their snapshots of the newest complete
        step stay until this generation has one. A step later than `start_step` does not stay.

        machines: of a run on several nodes, those that take part. Each is named as its node is in
        the topology; the mover's own may be included. sources: other machines that may hold the
        starting state. placement: of copies, as the choosing mover has it. restore_point: the
        chosen state, if another mover chose it. is_from_store: the chosen state is a checkpoint in
        the run store. If the call is repeated for one generation, the newest list counts.
        """
        is_alone = machines is None
        placed = {owner: list(peers) for owner, peers in (placement or {}).items()}
        request = messages.ExpectRequest(
            topology,
            table,
            start_step,
            is_from_store,
            None if machines is None else tuple(machines),
            None if is_alone else tuple(sources),
            None if is_alone else placed,
            None if restore_point is None or restore_point.durable else restore_point.key,
        )
        self._say(request, MOVER_ANSWER_TIMEOUT_S)

    def drain(self, wait_s: float = 30.0, until_durable: bool = True) -> bool:
        """Wait up to `wait_s` seconds for all saves under way; return True if they ended. Without
        `until_durable`, skip saves whose step is complete in memory: nothing of those is lost with
        the workers.

        Call this before the next generation is opened, which fences the saves. Otherwise saves that
        workers of a lost generation handed over in time would be lost.
        """
        request = messages.DrainRequest(wait_s, until_durable)
        return self._ask(request, messages.DrainReply, wait_s + MOVER_ANSWER_TIMEOUT_S).drained

    def find_restore_point(
        self,
        drain_s: float = 30.0,
        corrupt_keys: Mapping[str, str] | None = None,
        timeout_s: float = RESTORE_SEARCH_TIMEOUT_S,
        machines: Iterable[Peer] | None = None,
    ) -> RestorePoint:
        """The newest state that this generation can begin from, in memory or durable. The readers
        check its bytes; `corrupt_keys` names the checkpoints that they found corrupt: key ->
        reason.

        Waits up to `drain_s` seconds for what is under way. Call this after this client's
        generation was opened: that fences all older ones, so nothing older can appear afterwards.
        machines: those of the previous generation that still run. Their memory is searched too, in
        addition to the mover's own and the machines that the run file names.

        Raises CheckpointError when there are candidates but none can be trusted.
        """
        request = messages.RestorePointRequest(
            drain_s, dict(corrupt_keys or {}), None if machines is None else tuple(machines)
        )
        return self._ask(request, RestorePoint, timeout_s)

    def events(self, since: int, wait_s: float = 0.0) -> tuple[list[Event], int]:
        """Return the events since mark `since` (0 at first), and the next mark.

        Waits up to `wait_s` seconds for something to happen. Events: CheckpointCommitted,
        CheckpointFailed, CheckpointRejected, CheckpointRemoved.
        """
        request = messages.EventsRequest(since, wait_s)
        reply = self._ask(request, messages.EventsReply, wait_s + MOVER_ANSWER_TIMEOUT_S)
        return [event_from_json(kind, value) for kind, value in reply.events], reply.next

    def upload_progress(self, wait_s: float) -> PendingUpload | None:
        """Return the pending upload of the newest checkpoint; None once it has arrived, or without
        a bucket. Waits up to `wait_s` seconds."""
        request = messages.UploadRequest(wait_s)
        return self._ask(request, messages.UploadReply, wait_s + MOVER_ANSWER_TIMEOUT_S).left

    def status(self) -> dict[str, Any]:
        """Counts and the state of every arena, for people and metrics."""
        status = self._ask(messages.StatusRequest(), messages.StatusReply, MOVER_ANSWER_TIMEOUT_S)
        return status.to_json()

    # --- the workers' calls -----------------------------------------------------------------
    def get_arena(
        self,
        rank: int,
        blob_bytes: int,
        slots: int,
        has_released_old_memory: bool = False,
        numa_node: int | None = None,
    ) -> int:
        """The descriptor of an arena made for this rank; the caller closes it.
        has_released_old_memory: this process writes no more into those that it had of the rank in
        older generations. numa_node: from which new memory should come; None: from any."""
        request = messages.ArenaRequest(
            rank, blob_bytes, slots, has_released_old_memory, numa_node, self._arena_wait_s or None
        )
        timeout = 4 * MOVER_ANSWER_TIMEOUT_S
        _, fds = self._exchange(request, messages.Nothing, timeout)
        if len(fds) != 1:
            raise MoverGoneError("the mover sent no arena")
        return fds[0]

    def find_damage(self, key: str) -> str | None:
        """Return why a durable checkpoint cannot be restored, or None, for one that no worker will
        read. The mover reads every byte of it."""
        request = messages.DamageRequest(key)
        return self._ask(request, messages.DamageReply, FULL_READ_TIMEOUT_S).problem

    def holdings(self, key: str) -> Holdings:
        """The parts of a checkpoint that this node's mover has in memory. Raises MissingKeyError as
        text (HoldfastError) and CorruptError for a commit object that is missing or damaged."""
        request, timeout = messages.HoldingsRequest(key), 4 * MOVER_ANSWER_TIMEOUT_S
        reply, fds = self._exchange(request, messages.HoldingsReply, timeout)
        try:
            slots = {blob.key: (fds[blob.file], blob.slot, blob.header) for blob in reply.held}
            commit = Commit.from_bytes(reply.commit.encode(), key)
            return Holdings(commit, slots, reply.peers)
        except Exception:
            for fd in fds:
                os.close(fd)
            raise

    def holders(self, keys: Sequence[str]) -> tuple[BlobHolder, ...]:
        """Which peers have which of these blobs in memory: what makes a `PeerBlobs` of each. May
        take as long as asking all of them."""
        request = messages.HoldersRequest(list(keys))
        return self._ask(request, messages.HoldersReply, 4 * MOVER_ANSWER_TIMEOUT_S).peers

    def announce_capture(
        self,
        rank: int,
        step: int,
        slot: int,
        sequence: int,
        meta: Mapping[str, Json],
        destinations: SaveDestinations = DURABLE,
    ) -> None:
        """Slot `slot` holds the state after `step`: keep it in memory, and save it if its
        destinations say so. Returns before that is done."""
        request = messages.CaptureRequest(
            rank,
            step,
            slot,
            sequence,
            dict(meta),
            destinations.is_durable,
            destinations.to_peers,
            destinations.to_bucket,
        )
        self._say(request)

    def announce_skip(self, rank: int, step: int, reason: str) -> None:
        """Report that this rank has no snapshot of `step`; other ranks may have one."""
        self._say(messages.SkipRequest(rank, step, reason))

    def report_orphaned_saves(self, rank: int, steps: Sequence[int]) -> None:
        """This rank had handed these durable saves over to a mover that has ended since."""
        self._say(messages.OrphanedSavesRequest(rank, list(steps)))

    def wait_for_free_slot(self, rank: int, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for a slot of the rank's arena; return True if one became
        free."""
        request = messages.FreeSlotRequest(rank, timeout_s)
        return self._ask(
            request, messages.FreeSlotReply, timeout_s + TRAINING_ANSWER_TIMEOUT_S
        ).free

    def wait_until_committed(
        self, step: int, timeout_s: float, keep_alive: Callable[[], None] = lambda: None
    ) -> str | None:
        """Wait until the checkpoint of `step` is committed; return None, or why it is not.

        `keep_alive` is called every few seconds meanwhile: a large checkpoint takes long.
        """
        poll = partial(self.poll_save_end, step)
        return wait_until_ended(poll, timeout_s, keep_alive, COMMIT_POLL_S)

    def poll_save_end(self, step: int, wait_s: float) -> tuple[bool, str | None]:
        """Wait up to `wait_s` seconds for the save of `step`. Return True if it has ended, and why
        it is not committed, or None if it is. If it has not ended: the cause of a wait, or None."""
        request = messages.SaveEndRequest(step, wait_s)
        reply = self._ask(request, messages.SaveEndReply, wait_s + TRAINING_ANSWER_TIMEOUT_S)
        return reply.ended, reply.reason

    # --- the exchange -----------------------------------------------------------------------
    def _ask(self, request: messages.Request, reply: type[_Reply], timeout: float) -> _Reply:
        return self._exchange(request, reply, timeout)[0]

    def _say(self, request: messages.Request, timeout: float = TRAINING_ANSWER_TIMEOUT_S) -> None:
        self._exchange(request, messages.Nothing, timeout)

    def _exchange(
        self, request: messages.Request, reply: type[_Reply], timeout: float
    ) -> tuple[_Reply, list[int]]:
        """Send one request; return the answer and the descriptors that came with it. If an open
        connection turns out to be cut (long idle, or another mover), use a new one."""
        line, nonce = encode_request(
            self._secret, request.verb, request.to_json(), self.generation, self._clock()
        )
        received: tuple[bytes, list[int]] | None = None
        with suppress(IndexError):
            open_one = self._idle_connections.pop()
            with suppress(ConnectionError):
                received = self._exchange_over(open_one, line, timeout)
        if received is None:
            received = self._exchange_over(None, line, timeout)
        if received is None:
            raise MoverGoneError("the mover ended before it answered")
        return reply.from_json(parse_answer(self._secret, nonce, received[0])), received[1]

    def _exchange_over(
        self, connection: socket.socket | None, line: bytes, timeout: float
    ) -> tuple[bytes, list[int]] | None:
        """Return the answer over a connection, or over a new one for None. Return None if the
        connection ended before an answer. Raises ConnectionError if an open connection was cut,
        MoverGoneError otherwise."""
        was_open = connection is not None
        received = None
        try:
            connection = connection or socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(timeout)
            if not was_open:
                connection.connect(self._socket_path)
            send_line(connection, line)
            received = LineReader(connection).read_line()
        except (OSError, ValueError) as error:
            if was_open and isinstance(error, ConnectionError):
                raise
            raise MoverGoneError(f"the mover does not answer: {error}") from error
        finally:
            if received is not None and connection is not None:
                self._idle_connections.append(connection)
            elif connection is not None:
                connection.close()
        return received


def wait_until_ended(
    poll: Callable[[float], tuple[bool, str | None]],
    timeout_s: float,
    keep_alive: Callable[[], None],
    poll_s: float,
) -> str | None:
    """Ask until a save has ended; return None, or why it is not committed. `poll` waits so many
    seconds at most, and at most `poll_s`; `keep_alive` is called before each question."""
    end = time.monotonic() + timeout_s
    while True:
        keep_alive()
        left = max(0.0, end - time.monotonic())
        ended, reason = poll(min(left, poll_s))
        if ended:
            return reason
        if not left:  # asked once more after the wait: the mover may have been away
            return f"not committed after {timeout_s:g} s"


def _close_all(connections: list[socket.socket]) -> None:
    for connection in connections:
        connection.close()

"""The mover's process: `python -m holdfast.checkpoint.mover.main`.

The agent starts it with one JSON line on stdin (`MoverSpec`): the secret travels there and nowhere
else. It answers `{"ready": true}` on stdout when its socket listens. It ends with its agent: when
the lifeline pipe ends, or at SIGTERM, after finishing the writes it is in.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.bucket.pending_upload import PendingUpload
from holdfast.checkpoint.bucket.recover_folder import open_bucket
from holdfast.checkpoint.bucket.uploader import Uploader
from holdfast.checkpoint.mover import messages, protocol
from holdfast.checkpoint.mover.protocol import (
    LineReader,
    MoverRequest,
    encode_answer,
    parse_request,
)
from holdfast.checkpoint.mover.service import MoverService, MoverSettings
from holdfast.checkpoint.mover.socket_place import MoverSocket
from holdfast.checkpoint.peers.config import PeerSettings
from holdfast.checkpoint.save.retention import RetentionRules
from holdfast.core.json_parsing import JsonMessage
from holdfast.errors import FencedError, HoldfastError, UserError
from holdfast.wire import agent_watch, lifeline, process_log
from holdfast.wire.http.auth import AuthError, Verifier
from holdfast.wire.http.refusals import MOVER, Refusals
from holdfast.wire.process_end import skip_collections
from holdfast.wire.process_title import set_process_title
from holdfast.wire.secret import Secret
from holdfast.wire.store.location import open_store

if TYPE_CHECKING:
    from holdfast.checkpoint.mover.peer_wiring import PeerWiring

logger = logging.getLogger("holdfast.checkpoint.mover.main")  # it runs as __main__

THREAD_SWITCH_INTERVAL_S = 0.0005
"""Seconds between thread switches. Hashing small extents never releases the interpreter by itself.
A writing thread asks for it between every two calls to the disk, and would wait Python's 5 ms each
time."""
IDLE_CONNECTION_TIMEOUT_S = 60.0
"""A connection that sends nothing for so long is closed."""

FREE_DESCRIPTOR_WAIT_S = 1.0
"""Seconds that a connection without a free descriptor waits at least."""


@dataclass(frozen=True)
class MoverSpec:
    """The line on stdin. `store` is the run store's location, `lifeline` an inherited descriptor,
    -1 for none (tests)."""

    store: str
    socket: str
    settings: MoverSettings
    secret: str = field(repr=False)
    lifeline: int = -1
    peers: dict[str, Any] | None = None  # PeerSettings as JSON; None: no listener

    def to_json_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def from_json_line(line: bytes) -> MoverSpec:
        value = json.loads(line)
        return MoverSpec(**(value | {"settings": MoverSettings(**value["settings"])}))


class MoverServer:
    """Answers requests on the unix socket, one thread per connection."""

    def __init__(
        self,
        service: MoverService,
        secret: Secret,
        path: str,
        peer_wiring: PeerWiring | None = None,
        upload_progress: Callable[[float], PendingUpload | None] = lambda wait: None,
    ) -> None:
        """`upload_progress` says what keeps the newest checkpoint from being in the bucket."""
        self._service, self._upload_progress = service, upload_progress
        self._peer_wiring = peer_wiring
        self._secret = secret
        self._has_warned_full = False
        self._refusals = Refusals(service.save_tracker.emit)
        self._verifier = Verifier(secret, time.time, name="")  # no other user can listen in
        self._socket = MoverSocket(path)

    def serve(self, stop_fd: int) -> None:
        """Accept until the descriptor `stop_fd` can be read; or the lifeline ends the process."""
        while self._socket.wait_for_client(stop_fd):
            try:
                connection = self._socket.accept()
            except BlockingIOError:  # the client has left again
                continue
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                if self._wait_for_descriptor(stop_fd):
                    return
                continue
            threading.Thread(target=self._serve_connection, args=(connection,), daemon=True).start()

    def remove_socket(self) -> None:
        self._socket.remove()

    def _wait_for_descriptor(self, stop_fd: int) -> bool:
        """Wait without a free descriptor, with the client in the queue: saves under way give some
        back. Return True if `stop_fd` can be read meanwhile."""
        if not self._has_warned_full:
            self._has_warned_full = True
            logger.warning(
                "the mover has no descriptor left for another connection, which waits; raise the "
                "limit of open files (ulimit -n)"
            )
        return bool(select.select([stop_fd], [], [], FREE_DESCRIPTOR_WAIT_S)[0])

    def _serve_connection(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(IDLE_CONNECTION_TIMEOUT_S)
            process, user = _peer_credentials(connection)
            if user != os.getuid():
                self._refusals.count(MOVER, "other user")
                return
            reader = LineReader(connection)
            try:
                while (received := reader.read_line()) is not None:
                    line, fds = received
                    for fd in fds:  # no client sends us any
                        os.close(fd)
                    answer, passed = self._answer_line(line, process)
                    try:
                        protocol.send_line(connection, answer, passed)
                    finally:
                        for fd in passed:
                            os.close(fd)
            except (ValueError, AuthError) as error:
                self._refusals.count(MOVER, getattr(error, "fault", "too long"))
            except OSError:
                return  # a stray or a broken connection: nothing was done for it

    def _answer_line(self, line: bytes, pid: int) -> tuple[bytes, list[int]]:
        request = parse_request(line)
        self._verifier.check(protocol.METHOD, request.verb, request.raw, request.proof)
        fds: list[int] = []
        try:
            status, body = protocol.OK, self._dispatch(request, fds, pid).to_json()
        except FencedError as error:
            self._refusals.count(MOVER, "older generation")
            status, body = protocol.FENCED, protocol.error_to_json(error)
        except (UserError, HoldfastError) as error:
            status, body = protocol.REFUSED, protocol.error_to_json(error)
        except Exception as error:  # our own bug, or a malformed body: report it
            logger.exception("request %s failed", request.verb)
            text = f"{type(error).__name__}: {error}"
            status, body = protocol.FAILED, {"error": "HoldfastError", "message": text}
        return encode_answer(self._secret, request.proof.nonce, status, body), fds

    def _dispatch(self, request: MoverRequest, fds: list[int], pid: int) -> JsonMessage:
        """Return the answer; descriptors that go with it are appended to `fds`."""
        service, wiring, generation = self._service, self._peer_wiring, request.proof.generation
        match request.message():
            case messages.ExpectRequest() as expected:
                self._expect(generation, expected)
            case messages.ArenaRequest() as arena:
                fds.append(
                    service.get_arena(
                        generation,
                        arena.rank,
                        arena.blob_bytes,
                        arena.slots,
                        pid,
                        arena.let_go,
                        arena.patience or 0.0,
                        arena.numa_node,
                    )
                )
            case messages.CaptureRequest() as capture:
                service.accept_capture(generation, **vars(capture))
            case messages.SkipRequest(rank, step, reason):
                service.accept_skip(generation, rank, step, reason)
            case messages.OrphanedSavesRequest(rank, steps):
                service.report_orphaned_saves(generation, rank, steps)
            case messages.FreeSlotRequest(rank, wait):
                return messages.FreeSlotReply(service.wait_for_free_slot(generation, rank, wait))
            case messages.SaveEndRequest(step, wait):
                end = service.save_tracker.wait_until_ended((generation, step), wait)
                return messages.SaveEndReply(*end)
            case messages.DrainRequest(wait, durable):
                return messages.DrainReply(service.drain(wait, durable))
            case messages.RestorePointRequest(drain, tried, machines):
                if machines is not None and wiring is not None:
                    wiring.search_machines(machines)
                placement = {} if wiring is None else wiring.placement
                point = service.find_restore_point(generation, drain, tried)
                return replace(point, placement=placement)
            case messages.HoldingsRequest(key):
                reply, blob_fds = service.holdings(generation, key)
                fds += blob_fds
                return reply
            case messages.HoldersRequest(keys):
                return messages.HoldersReply(service.holders(generation, keys))
            case messages.DamageRequest(key):
                return messages.DamageReply(service.find_damage(generation, key))
            case messages.EventsRequest(since, wait):
                return messages.EventsReply(*service.save_tracker.events_since(since, wait))
            case messages.UploadRequest(wait):
                is_leader = service.is_leader
                return messages.UploadReply(self._upload_progress(wait) if is_leader else None)
            case messages.StatusRequest():
                return service.status(None if wiring is None else wiring.peer_tier.status())
        return messages.Nothing()

    def _expect(self, generation: int, request: messages.ExpectRequest) -> None:
        """Begin a generation: the peers are named before the service asks them, and told of their
        plan once it serves the generation."""
        topology, table, wiring = request.topology, request.table, self._peer_wiring
        process_log.enter(generation)
        logger.info("the generation has %d ranks", topology.world_size)
        cohort = None
        if wiring is not None:
            cohort = wiring.cohort_of(request)
            wiring.search_cohort(cohort)
        self._service.expect(
            generation, topology, table, request.start, cohort, request.key, request.stored
        )
        if wiring is not None:
            wiring.peer_tier.begin_generation(topology, table, cohort)


def _peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end (SO_PEERCRED: pid, uid, gid)."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, user, _ = struct.unpack("3i", raw)
    return int(process), int(user)


def _make_peer_wiring(spec: MoverSpec, service: MoverService) -> PeerWiring | None:
    if spec.peers is None:
        return None
    # A mover that serves no peers starts without asyncio.
    from holdfast.checkpoint.mover.peer_wiring import PeerWiring

    settings = PeerSettings.from_json(spec.peers)
    secret = Secret.from_hex(spec.secret)
    return PeerWiring(settings, spec.settings, service, open_store(spec.store), secret)


def _make_uploader(spec: MoverSpec, service: MoverService) -> Uploader | None:
    """Tier 3: a bucket that gets every checkpoint too."""
    location = spec.settings.bucket
    if not location:
        return None
    keep = RetentionRules(spec.settings.bucket_keep_last, spec.settings.keep_every)
    uploader = Uploader(
        open_store(spec.store),
        lambda: open_bucket(location),
        keep,
        service.save_tracker.emit,
        rejected_keys=service.rejected_keys,
    )

    def committed(key: str) -> None:
        if service.should_upload(key):
            uploader.request_upload(key)

    service.save_tracker.commit_listeners.append(committed)
    service.set_in_use_keys(uploader.keys_in_use)
    return uploader


def _forward_sigterm(stop_fd: int) -> None:
    """Write into `stop_fd` when our parent sends SIGTERM. A scheduler that warns every process of a
    job sends it too: that one the agent answers, which needs its mover then."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os.write(stop_fd, b"\0")


def main() -> None:
    skip_collections()
    lifeline.ignore_agent_signals(signal.SIGTERM)
    own = hasattr(signal, "sigwaitinfo")  # not on macOS
    if own:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # before any thread begins
    sys.setswitchinterval(THREAD_SWITCH_INTERVAL_S)
    boot = MoverSpec.from_json_line(sys.stdin.buffer.readline())
    process_log.start("mover", sys.stderr)
    set_process_title("mover", boot.settings.run)
    if boot.lifeline >= 0:
        lifeline.watch_lifeline(boot.lifeline)
        agent_watch.watch_agent()
    try:
        service = MoverService(open_store(boot.store), boot.settings)
        peers = _make_peer_wiring(boot, service)
        uploader = _make_uploader(boot, service)
        server = MoverServer(
            service,
            Secret.from_hex(boot.secret),
            boot.socket,
            peers,
            *([] if uploader is None else [uploader.wait_for_newest]),
        )
    except UserError as error:  # a run folder that is away, an address that cannot be listened on
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)

    # The signal writes into a pipe: a handler that raises would be too late for an accept that is
    # just about to block.
    leave, signalled = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    if own:
        threading.Thread(target=_forward_sigterm, args=(signalled,), daemon=True).start()
    else:
        signal.set_wakeup_fd(signalled)
        signal.signal(signal.SIGTERM, lambda *_: None)
    address = "" if peers is None else peers.peer_tier.address
    logger.info("ready")
    print(json.dumps({"ready": True, "pid": os.getpid(), "peers": address}), flush=True)
    try:
        server.serve(leave)
    finally:
        if peers is not None:
            peers.close()
        service.close()
        if uploader is not None:
            uploader.close()
        server.remove_socket()


if __name__ == "__main__":
    main()

"""The mover's listener for movers of other machines: serves snapshots by range, takes offers.

The head of a request alone proves its sender (`RequestGuard`). Only then is a body read. Next, the
generation is compared with the newest that was ever seen here. An older one is fenced. A newer one,
which only a holder of the run's secret can name, becomes the newest. So after a client has opened a
generation and requested the inventory, nothing older can be added.

An event loop on a thread of its own reads and answers. What may wait is done on other threads: the
answers to offers, and the bytes of ranges. A range leaves by sendfile(2), from the memory file to
the socket. The slot's header is compared before and after. If the slot has changed meanwhile, the
connection is cut. Should that come too late, the receiver's checksums show it.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http import HTTPStatus
from urllib.parse import parse_qs, urlsplit

from holdfast.checkpoint.memory.snapshot_store import Snapshot, SnapshotStore
from holdfast.checkpoint.peers.client import (
    FAILED,
    FENCED,
    INVENTORY_PATH,
    MISSING,
    NEWEST,
    OFFER_PATH,
    OK,
    RANGE_PATH,
    REFUSED,
    TOO_LONG,
    UNKNOWN,
    USE_COPY,
)
from holdfast.checkpoint.peers.messages import GenerationPlan, Inventory, NewestReply, Offer
from holdfast.checkpoint.peers.rate_limiter import TokenBucket
from holdfast.checkpoint.peers.receiver import SnapshotReceiver
from holdfast.core.format.manifest import parse_blob_key
from holdfast.core.json_parsing import JsonObject, parse_json
from holdfast.errors import FencedError, HoldfastError
from holdfast.wire.http.auth import Proof, Verifier
from holdfast.wire.http.connection import BodyHandler, FileBody, HttpResponse, RequestHead, SendFile
from holdfast.wire.http.connection_limits import PROOF_TIMEOUT_S, ConnectionLimiter
from holdfast.wire.http.refusals import PEERS, Refusals
from holdfast.wire.http.server import BodyClaim, HttpListener, RequestGuard
from holdfast.wire.http.sockets import address_of
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import MissingKeyError

MAX_THREADS = 64
"""Ranges that are served at a time, and as many offers."""
MAX_BODY_BYTES = 64 << 20
"""Bytes of an offer at most: the manifest of a part, and the state table."""
SEND_PIECE_BYTES = 1 << 20
"""Bytes that leave at a time: the grain of the budget."""


class PeerServer(RequestGuard):
    """Serves one shelf on a socket that is bound already."""

    def __init__(
        self,
        bound_socket: socket.socket,
        secret: Secret,
        snapshot_store: SnapshotStore,
        receiver: SnapshotReceiver,
        rate_limiter: TokenBucket,
        run_id: str | None,
        *,
        clock: Callable[[], float] = time.time,
        proof_timeout_s: float = PROOF_TIMEOUT_S,
        wait_until_hashed: Callable[[], object] = lambda: None,
        refusals: Refusals | None = None,
    ) -> None:
        """`run_id`: whose snapshots lie here (`identity`); None: of whichever run speaks first,
        until nothing of it is kept any more. `wait_until_hashed` waits, for a moment, for what is
        being hashed: it belongs into the inventory."""
        limiter = ConnectionLimiter(PEERS, refusals, proof_timeout_s=proof_timeout_s)
        super().__init__(secret, Verifier(secret, clock), limiter)
        bound_socket.setblocking(False)
        self.address = address_of(bound_socket)
        self._snapshot_store, self._receiver = snapshot_store, receiver
        self._rate_limiter, self._wait_until_hashed = rate_limiter, wait_until_hashed
        self.post_handlers: dict[str, Callable[[int, JsonObject], JsonObject]] = {
            OFFER_PATH: lambda generation, body: receiver.answer_offer(
                generation, Offer.from_json(body)
            ).to_json()
        }
        """What is answered with a body, by path, given the sender's generation."""
        self.sent_bytes = 0  # bytes of ranges, for the status
        self._lock = threading.Lock()
        self._newest_generation = 0
        self._run_id, self._is_bound_to_run = run_id, run_id is not None
        # An offer waits for ranges of another mover, so ranges have threads of their own.
        self._threads = ThreadPoolExecutor(MAX_THREADS, "peer request")
        self._range_threads = ThreadPoolExecutor(MAX_THREADS, "peer range")
        self._listener = HttpListener(self, bound_socket)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="peers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _serve(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._listener.serve())
        self._loop.close()

    def close(self) -> None:
        """End what is under way."""
        for threads in (self._threads, self._range_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._thread.is_alive():
            with suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._listener.abort)
            self._thread.join()

    def admit_request(self, run_id: str, generation: int) -> None:
        """Raises FencedError for a generation older than the newest one seen, and ValueError for
        another run's."""
        with self._lock:
            if run_id != self._run_id:
                if self._is_bound_to_run or not self._receiver.is_idle:
                    raise ValueError("the snapshots of another run are kept here")
                self._run_id, self._newest_generation = run_id, 0
            if generation < self._newest_generation:
                raise FencedError(
                    f"generation {generation} is over: {self._newest_generation} rules"
                )
            self._newest_generation = generation

    def advance_generation(self, generation: int) -> None:
        """This mover's own agent has opened a generation."""
        with self._lock:
            self._newest_generation = max(self._newest_generation, generation)

    @property
    def newest_generation(self) -> int:
        with self._lock:
            return self._newest_generation

    def newest_generation_of(self, run_id: str) -> int:
        """The newest generation of a run that ever asked here; 0 for a run that is not known."""
        with self._lock:
            return self._newest_generation if run_id == self._run_id else 0

    # --- requests ---------------------------------------------------------------------------
    def admit(self, head: RequestHead) -> HttpResponse | BodyHandler:
        method, target = head.method, head.target.decode("latin-1")
        if method not in (b"GET", b"POST"):
            return self.refuse(HTTPStatus.NOT_IMPLEMENTED, "not ours")
        try:
            length = BodyClaim.of(head).length
        except ValueError:
            return self.refuse(TOO_LONG, "malformed")
        if length > MAX_BODY_BYTES:
            return self.refuse(TOO_LONG, "too long")
        if method == b"GET" and length:
            return self.refuse(REFUSED, "malformed")
        proven = self.prove(head, target)
        if isinstance(proven, HttpResponse):
            return proven
        proof, claim = proven

        async def read(body: bytes) -> HttpResponse:
            if not claim.matches(body):
                return self.refuse(UNKNOWN, "wrong proof")
            return await self._answer(method.decode(), target, proof, body)

        return read

    async def _answer(self, method: str, target: str, proof: Proof, body: bytes) -> HttpResponse:
        try:
            parts = urlsplit(target)
            query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
            run_id, asked = query.get("run", ""), (method, parts.path)
            if parts.path != NEWEST:
                self.admit_request(run_id, proof.generation)
            if asked == ("GET", RANGE_PATH):
                return self._range(proof, target, query)
            if asked == ("GET", NEWEST):
                value = NewestReply(self.newest_generation_of(run_id)).to_json()
            elif asked == ("GET", INVENTORY_PATH):
                value = await self._on_thread(self._inventory)
            elif method == "POST" and (handler := self.post_handlers.get(parts.path)) is not None:
                request = parse_json(body)
                if not isinstance(request, dict):
                    raise ValueError("the body is not a JSON object")
                value = await self._on_thread(lambda: handler(proof.generation, request))
            else:
                raise MissingKeyError(f"there is nothing to ask at {target[:80]!r}")
            return self.sign(proof, OK, value)
        except FencedError as error:
            self.count("older generation")
            return self.sign(proof, FENCED, {"error": str(error)})
        except MissingKeyError as error:
            return self.sign(proof, MISSING, {"error": str(error)})
        except (HoldfastError, ValueError, KeyError, TypeError) as error:
            return self.sign(proof, REFUSED, {"error": f"{type(error).__name__}: {error}"})
        except Exception as error:  # our own bug
            return self.sign(proof, FAILED, {"error": f"{type(error).__name__}: {error}"})

    async def _on_thread(self, work: Callable[[], JsonObject]) -> JsonObject:
        return await self._loop.run_in_executor(self._threads, work)

    def _inventory(self) -> JsonObject:
        self._wait_until_hashed()
        return inventory_of(self._snapshot_store).to_json()

    # --- bytes ------------------------------------------------------------------------------
    def _range(self, proof: Proof, target: str, query: dict[str, str]) -> HttpResponse:
        """Answer with bytes of a slot; what goes wrong before the first of them is raised."""
        start, stop = int(query["start"]), int(query["stop"])
        place = parse_blob_key(query["key"])
        if place is None:
            raise ValueError(f"{query['key']!r} is not the key of a blob")
        snapshot = self._snapshot_store.get(*place)
        if not 0 <= start < stop <= snapshot.header.length:
            raise ValueError(f"bytes [{start}, {stop}) of {snapshot.header.length}")
        is_copy = query.get("use") == USE_COPY

        def send(send_file: SendFile) -> bool:
            return self._send_slot(send_file, snapshot, start, stop, is_copy)

        headers = self.signed_headers(proof, OK, target.encode(), "application/octet-stream")
        return HttpResponse(OK, FileBody(stop - start, send, self._range_threads), headers)

    def _send_slot(
        self, send_file: SendFile, snapshot: Snapshot, start: int, stop: int, is_rate_limited: bool
    ) -> bool:
        """Send a slot's range; return True if it held the snapshot until the last piece was
        sent."""
        offset = snapshot.memory.arena.data_offset(snapshot.slot)
        while start < stop:
            piece = min(SEND_PIECE_BYTES, stop - start)
            if is_rate_limited:
                self._rate_limiter.take(piece)
            if not snapshot.is_intact:
                return False
            send_file(snapshot.memory.fd, offset + start, piece)
            self.sent_bytes += piece
            start += piece
        return snapshot.is_intact


def inventory_of(snapshot_store: SnapshotStore) -> Inventory:
    """The sealed manifests of every snapshot, and the plans that say who the writers are."""
    snapshots = snapshot_store.inventory()
    plans = {}
    for generation in {line.generation for line in snapshots}:
        with suppress(KeyError):
            plans[generation] = GenerationPlan(*snapshot_store.topology_and_table(generation))
    return Inventory(tuple(line.sealed_manifest.decode() for line in snapshots), plans)

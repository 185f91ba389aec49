"""Keeps snapshots of other machines: an offer is pulled, checked, and put into the store.

Per rank there is one memory file of two slots. An offer carries the sealed part manifest, so the
receiver knows every extent's checksum before a byte travels. If the receiver already holds an
extent of the same rank (frozen parameters, unused experts), it copies the extent locally. It reads
the rest from the sender straight into the slot, and checks each extent in place. It writes the
slot's header last. A pull that breaks off leaves a dirty slot, and the other slot intact.

    offered -> pulling -> held
                  '-----> refused     (no room, wrong bytes, the offerer is gone): asked again later

The newest step that is complete here is never overwritten. A step is complete here if the store has
it from every rank that the senders of its generation have announced. It is dropped in two cases:
the next generation is complete here, or finds no other room. In the second case the sender has the
next generation's state in its own memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYetError
from dataclasses import dataclass

from xxhash import xxh3_128_hexdigest

from holdfast.checkpoint.format.blob import parse_header
from holdfast.checkpoint.memory.arena import Arena, identity_digest, slot_capacity
from holdfast.checkpoint.memory.snapshot_store import MemoryFile, Snapshot, SnapshotStore
from holdfast.checkpoint.peers.client import USE_COPY
from holdfast.checkpoint.peers.connections import SenderConnection, SenderConnections
from holdfast.checkpoint.peers.messages import GenerationPlan, Offer, OfferReply
from holdfast.core.format.manifest import Extent, PartManifest, PlacedBox, blob_key
from holdfast.core.json_parsing import JsonObject
from holdfast.errors import CorruptError, FencedError, HoldfastError
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import MissingKeyError

MAX_CONCURRENT_PULLS = 4
"""Ranks that are pulled at a time."""
OFFER_ANSWER_TIMEOUT_S = 10.0
"""An offer is answered within this time, with "pulling" at least. The sender asks again."""
EXTENT_READ_ATTEMPTS = 2
"""Reads of an extent whose bytes are not what the manifest says."""

SnapshotName = tuple[int, int, int]  # generation, step, rank

OFFER_HELD, OFFER_PULLING, OFFER_NEEDS_PLAN = "held", "pulling", "plan"


@dataclass(frozen=True)
class _Offer:
    """The contents of an offer, after all checks that need no bytes of the snapshot."""

    part: PartManifest
    sealed_manifest: bytes
    run_id: str
    sender_address: str  # "host:port" of who offers
    announced_ranks: frozenset[int]  # that the offerer sends here, in this generation

    @property
    def name(self) -> SnapshotName:
        return self.part.generation, self.part.step, self.part.rank

    @staticmethod
    def check(generation: int, offer: Offer) -> _Offer:
        """Raises CorruptError, FencedError, ValueError."""
        stored = offer.part.encode()
        part = PartManifest.from_bytes(stored, "an offer's part manifest")
        if part.generation != generation:
            raise FencedError(f"generation {generation} offers a part of {part.generation}")
        if part.blob.key != blob_key(part.generation, part.step, part.writer) or part.rank < 0:
            raise CorruptError(f"{part.blob.key} is not the blob of rank {part.rank}")
        if not 0 < part.blob.data_start <= part.blob.size:
            raise CorruptError(f"{part.blob.key} has {part.blob.size} bytes")
        ranks = frozenset(offer.ranks)
        if part.rank not in ranks:
            raise ValueError(f"rank {part.rank} is not among the ranks that are announced")
        return _Offer(part, stored, offer.run, offer.source, ranks)


class SnapshotReceiver:
    """Snapshots that one mover keeps for other machines. Safe to use from any thread."""

    def __init__(
        self,
        snapshot_store: SnapshotStore,
        secret: Secret,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_bytes`: bytes that all memory files of other machines may take together."""
        self._snapshot_store, self._clock = snapshot_store, clock
        self._max_bytes, self._lock = max_bytes, threading.Lock()
        # Two slots for each rank of other machines, by (rank, capacity).
        self._memory: dict[tuple[int, int], MemoryFile] = {}
        # Ours in the store, and their places.
        self._kept_slots: dict[SnapshotName, tuple[MemoryFile, int]] = {}
        # generation -> announced to be sent here
        self._announced_ranks: dict[int, frozenset[int]] = {}
        self._files_being_written: set[int] = set()  # ids of the memory files that are pulled into
        self._reused_by_snapshot: dict[SnapshotName, int] = {}  # bytes that did not travel
        # by rank, the last one
        self._known_headers: dict[int, tuple[bytes, tuple[PlacedBox, ...]]] = {}
        self._pulls: dict[int, tuple[SnapshotName, Future[None]]] = {}  # rank -> what is under way
        # rank -> the pull that broke off last
        self._interrupted_pulls: dict[int, SnapshotName] = {}
        self._senders = SenderConnections(secret)
        self._closed = False
        self._pull_threads = ThreadPoolExecutor(MAX_CONCURRENT_PULLS, "pull")
        self.pulled_bytes = 0  # bytes that came over the network
        self.reused_bytes = 0  # bytes that lay here already
        self.refused_offers = 0  # offers that ended without being held

    def answer_offer(self, generation: int, offer: Offer) -> OfferReply:
        """Pull what is offered. Raises what made the pull fail, and for an offer that makes no
        sense ValueError, CorruptError, FencedError."""
        offered = _Offer.check(generation, offer)
        if not self._ensure_plan_known(generation, offer.plan):
            return OfferReply(OFFER_NEEDS_PLAN)
        with self._lock:
            before = self._announced_ranks.get(generation, frozenset())
            self._announced_ranks[generation] = before | offered.announced_ranks
            if offered.name in self._kept_slots and self._is_stored(offered.name):
                return self._held_answer(offered.name)
            name, future = self._current_or_new_pull(offered)
        try:
            future.result(OFFER_ANSWER_TIMEOUT_S)
        except Exception as error:
            if name != offered.name or (isinstance(error, NotYetError) and not future.done()):
                return OfferReply(OFFER_PULLING)  # or the pull of another step
            raise
        return (
            self._held_answer(offered.name)
            if self._is_stored(offered.name)
            else OfferReply(OFFER_PULLING)
        )

    def _held_answer(self, name: SnapshotName) -> OfferReply:
        return OfferReply(OFFER_HELD, self._reused_by_snapshot.get(name, 0))

    @property
    def is_idle(self) -> bool:
        """Return True if nothing is kept, nor about to be."""
        with self._lock:
            return not self._kept_slots and all(future.done() for _, future in self._pulls.values())

    def status(self) -> JsonObject:
        with self._lock:
            return {
                "room": self._max_bytes,
                "used": self._used_bytes(),
                "snapshots": [list(name) for name in sorted(self._kept_slots)],
                "pulled": self.pulled_bytes,
                "reused": self.reused_bytes,
                "refused": self.refused_offers,
            }

    def close(self) -> None:
        """Give up what is being pulled."""
        self._pull_threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
        self._senders.close()

    # --- one offer --------------------------------------------------------------------------
    def _ensure_plan_known(self, generation: int, plan: GenerationPlan | None) -> bool:
        """Return True if the writers of a generation are known, if necessary from the offer."""
        try:
            self._snapshot_store.topology_and_table(generation)
        except KeyError:
            if plan is None:
                return False
            if plan.topology.generation != generation:
                raise ValueError("the plan is of another generation") from None
            self._snapshot_store.open_generation(generation, plan.topology, plan.table)
        return True

    def _current_or_new_pull(self, offered: _Offer) -> tuple[SnapshotName, Future[None]]:
        """Return the rank's running pull, of any step; start one if there is none."""
        rank = offered.part.rank
        under_way = self._pulls.get(rank)
        if under_way is not None and not under_way[1].done():
            return under_way
        self._pulls[rank] = (offered.name, self._pull_threads.submit(self._pull, offered))
        return self._pulls[rank]

    def _pull(self, offered: _Offer) -> None:
        part = offered.part
        memory: MemoryFile | None = None
        try:
            source = self._senders.connect(offered.sender_address, part.generation, offered.run_id)
            memory, slot = self._claim_slot(part)
            memory.arena.begin_write(slot)
            view = memory.arena.data(slot, part.blob.size)
            try:
                again = self._interrupted_pulls.get(part.rank) == offered.name
                self._reused_by_snapshot[offered.name] = self._fill(part, view, source, again)
                head = bytes(view[: part.blob.data_start])
            finally:
                view.release()
            self._check_blob_header(part, head)
            self._store(offered, memory, slot, head)
        except BaseException:
            with self._lock:
                self.refused_offers += 1
                self._interrupted_pulls[part.rank] = offered.name
            raise
        finally:
            with self._lock:
                self._files_being_written.discard(id(memory))

    def _fill(
        self, part: PartManifest, view: memoryview, source: SenderConnection, is_resumed: bool
    ) -> int:
        """Every extent of the blob, from what lies here or over the network, and checked; bytes
        that lay here. `is_resumed`: the slot may hold some of them, from a pull that broke off."""
        # checksum -> where an extent of the same rank lies that has it: snapshot, offset.
        here: dict[str, tuple[SnapshotName, int]] = {}
        wanted = frozenset(part.blob.checksums)
        with self._lock:
            names = [name for name in self._kept_slots if name[2] == part.rank]
        for name in names:
            try:
                blob = self._snapshot_store.get(*name).part.blob
            except MissingKeyError:
                continue
            if wanted.isdisjoint(blob.checksums):
                continue
            here |= {e.xxh3: (name, e.offset) for e in blob.extents() if e.xxh3 in wanted}
        missing: list[Extent] = []
        spared = 0
        for extent in part.blob.extents():
            out = view[extent.offset : extent.offset + extent.length]
            twin = here.get(extent.xxh3)
            if is_resumed and _matches_checksum(out, extent.xxh3):
                continue
            if (
                twin is not None
                and self._copy_from_snapshot(*twin, out)
                and _matches_checksum(out, extent.xxh3)
            ):
                spared += extent.length
                self.reused_bytes += extent.length
                continue
            missing.append(extent)
        at = 0
        while at < len(missing):
            run = _adjacent_extents(missing, at, source.request_bytes)
            at += len(run)
            begun = self._clock()
            self._read_extents(part, run, view, source)
            source.record_request(
                self._clock() - begun, run[-1].offset + run[-1].length - run[0].offset
            )
        return spared

    def _read_extents(
        self,
        part: PartManifest,
        extents: Sequence[Extent],
        view: memoryview,
        source: SenderConnection,
    ) -> None:
        """Extents that follow one another, in one request; those that came wrong, once more."""
        client = source.client
        for attempt in range(EXTENT_READ_ATTEMPTS):
            start, stop = extents[0].offset, extents[-1].offset + extents[-1].length
            client.read_into(part.blob.key, start, view[start:stop], USE_COPY)
            self.pulled_bytes += stop - start
            wrong = [
                e
                for e in extents
                if not _matches_checksum(view[e.offset : e.offset + e.length], e.xxh3)
            ]
            if not wrong:
                return
            extents = extents[extents.index(wrong[0]) : extents.index(wrong[-1]) + 1]
            if attempt == EXTENT_READ_ATTEMPTS - 1:
                raise CorruptError(
                    f"{part.blob.key}: {client.address} sent other bytes than it announced in "
                    f"[{wrong[0].offset}, {wrong[0].offset + wrong[0].length})"
                )

    def _copy_from_snapshot(self, name: SnapshotName, offset: int, out: memoryview) -> bool:
        try:
            self._snapshot_store.read_into(*name, offset, out)
        except (MissingKeyError, CorruptError):
            return False  # overwritten meanwhile, or shorter: it comes over the network then
        return True

    # --- the memory of what is kept ---------------------------------------------------------
    def _check_blob_header(self, part: PartManifest, header: bytes) -> None:
        """Raises CorruptError when a blob's header does not list what its part does. A rank's is
        the same at every step, and parsed once."""
        if self._known_headers.get(part.rank) == (header, part.tensors):
            return
        if set(parse_header(header, part.blob.key)) != set(part.tensors):
            raise CorruptError(f"{part.blob.key}: its header does not list what its part does")
        self._known_headers[part.rank] = (header, part.tensors)

    def _claim_slot(self, part: PartManifest) -> tuple[MemoryFile, int]:
        """Return the slot for a rank's part; it is never that of the newest complete step.

        Raises HoldfastError when there is no room.
        """
        capacity = slot_capacity(part.blob.size)
        with self._lock:
            memory = self._memory.get((part.rank, capacity))
            if memory is None:
                self._make_room(part.generation, 2 * capacity)
                name = f"holdfast-{part.generation}-{part.rank}-copy"
                memory = MemoryFile(Arena.create(name, 2, capacity))
                self._memory[part.rank, capacity] = memory
            newest = self._newest_complete()
            held = {slot: name for name, (file, slot) in self._kept_slots.items() if file is memory}
            slots = [s for s in range(memory.arena.slots) if s not in held]
            slots += sorted((s for s in held if held[s][:2] != newest), key=lambda s: held[s])
            chosen = slots[0]  # of two, one at most is protected
            if chosen in held:
                self._drop(held[chosen])
            if memory.arena.is_held(chosen):
                raise HoldfastError(f"the slot for rank {part.rank} is being read")
            self._files_being_written.add(id(memory))
            return memory, chosen

    def _store(self, offered: _Offer, memory: MemoryFile, slot: int, blob_header: bytes) -> None:
        """Header last, then onto the shelf; a generation that is complete here ends the older
        ones."""
        part = offered.part
        header = memory.arena.finish_write(
            slot,
            identity_digest(offered.run_id),
            part.generation,
            part.step,
            part.blob.size,
            identity_digest(blob_header),
        )
        with self._lock:
            self._snapshot_store.put(
                Snapshot(part, offered.sealed_manifest, memory, slot, header, is_own=False)
            )
            self._kept_slots[offered.name] = (memory, slot)
            newest = self._newest_complete()
            if newest is not None:
                self._drop_where(lambda name: name[0] < newest[0])
                self._announced_ranks = {
                    g: r for g, r in self._announced_ranks.items() if g >= newest[0]
                }

    def _newest_complete(self) -> tuple[int, int] | None:
        """(generation, step) of the newest step of which every announced rank lies here."""
        steps: dict[tuple[int, int], set[int]] = {}
        for generation, step, rank in filter(self._is_stored, self._kept_slots):
            steps.setdefault((generation, step), set()).add(rank)
        whole = [
            key for key, ranks in steps.items() if ranks >= self._announced_ranks.get(key[0], ranks)
        ]
        return max(whole, default=None)

    def _make_room(self, generation: int, need: int) -> None:
        """Free memory of older generations until there is room for `need` bytes, incomplete steps
        first."""
        newest = self._newest_complete()
        for spared in (newest, None):
            if self._used_bytes() + need <= self._max_bytes:
                return
            old = {name for name in self._kept_slots if name[0] < generation and name[:2] != spared}
            self._drop_where(old.__contains__)
        if self._used_bytes() + need > self._max_bytes:
            raise HoldfastError(
                f"no room for a copy of {need // 2} bytes in two slots: {self._used_bytes()} of "
                f"{self._max_bytes} bytes are taken"
            )

    def _used_bytes(self) -> int:
        return sum(file.nbytes for file in self._memory.values())

    def _drop_where(self, should_drop: Callable[[SnapshotName], bool]) -> None:
        """Drop snapshots, and the memory files that hold none any more."""
        for name in [name for name in self._kept_slots if should_drop(name)]:
            self._drop(name)
        used = {id(file) for file, _ in self._kept_slots.values()} | self._files_being_written
        self._memory = {key: file for key, file in self._memory.items() if id(file) in used}
        ranks = {rank for rank, _ in self._memory}
        self._known_headers = {
            rank: head for rank, head in self._known_headers.items() if rank in ranks
        }

    def _drop(self, name: SnapshotName) -> None:
        del self._kept_slots[name]
        self._reused_by_snapshot.pop(name, None)
        self._snapshot_store.drop(*name)

    def _is_stored(self, name: SnapshotName) -> bool:
        try:
            self._snapshot_store.get(*name)
        except MissingKeyError:
            return False
        return True


def _adjacent_extents(extents: Sequence[Extent], first: int, max_bytes: int) -> Sequence[Extent]:
    """Extent number `first`, and those behind it without a gap, up to `max_bytes` bytes in all."""
    stop = first + 1
    end = extents[first].offset + extents[first].length
    while stop < len(extents) and extents[stop].offset == end:
        end += extents[stop].length
        if end - extents[first].offset > max_bytes:
            break
        stop += 1
    return extents[first:stop]


def _matches_checksum(view: memoryview, checksum: str) -> bool:
    return bool(xxh3_128_hexdigest(view) == checksum)

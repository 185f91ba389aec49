"""Two processes of tier 1 without torch: a node that sends snapshots of known states, and a staging
machine that keeps them. Both are forked and answer lines of JSON."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from holdfast.checkpoint.format.blob import ExtentHasher
from holdfast.checkpoint.memory.arena import Arena, identity_digest, slot_capacity
from holdfast.checkpoint.memory.snapshot_store import MemoryFile, Snapshot, SnapshotStore
from holdfast.checkpoint.peers import offer_transport
from holdfast.checkpoint.peers.client import run_identity
from holdfast.checkpoint.peers.config import Peer, PeerSettings
from holdfast.checkpoint.peers.peer_tier import PeerTier
from holdfast.checkpoint.peers.staging_node import StagingNode
from holdfast.core.format.manifest import PartManifest, blob_key, writer_name
from holdfast.policy.placement import Machine
from holdfast.wire.secret import Secret
from tests.support.checkpoint_faults import states
from tests.support.checkpoint_faults.histories import EXTENT_BYTES
from tests.support.checkpoint_faults.verdict import WrongError
from tests.support.ranks import DEADLINE_S

RUN = run_identity("config", "data")
ROOM = 1 << 24

Hook = Callable[[], None]
"""Run in a child before it begins: its fault."""


class Child:
    """A forked process that answers lines of JSON on pipes."""

    def __init__(self, build: Callable[[], Any], hook: Hook) -> None:
        """`build()` makes an object with `address` and methods of JSON values."""
        here, there = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                here.close()
                hook()
                _answer(build(), there)
            finally:
                os._exit(70)
        there.close()
        here.settimeout(DEADLINE_S)
        self._lines = here.makefile("rwb")
        self._socket = here
        self.ended = False

    def do(self, verb: str, *arguments: Any) -> Any:
        """Raises EOFError when it has ended, and WrongError when it says what went wrong."""
        line = b""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._lines.write(json.dumps([verb, *arguments]).encode() + b"\n")
            self._lines.flush()
            line = self._lines.readline()
        if not line:
            raise EOFError(verb)
        value, error = json.loads(line)
        if error is not None:
            raise WrongError(f"{verb}: {error}")
        return value

    def close(self) -> None:
        if self.ended:
            return
        self.ended = True
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        with suppress(OSError):
            self._lines.close()
        self._socket.close()


def _answer(served: Any, there: socket.socket) -> None:
    for line in there.makefile("rb"):
        verb, *arguments = json.loads(line)
        try:
            found = getattr(served, verb)(*arguments)
            answer = [found() if callable(found) else found, None]
        except Exception as error:
            answer = [None, f"{type(error).__name__}: {error}"]
        there.sendall(json.dumps(answer).encode() + b"\n")


class Owner:
    """A node's tier 1: snapshots of known states, sent to one peer, which is asked again at once
    where it fails."""

    def __init__(self, secret: Secret, peer: str) -> None:
        offer_transport.OFFER_RETRY_DELAYS_S = (0.01, 0.02)
        offer_transport.FAILED_DESTINATION_PAUSES_S = (0.0,)
        self.shelf = SnapshotStore()
        settings = PeerSettings(Machine("node"), (Peer(Machine("stage"), peer),), room=ROOM)
        self.peers = PeerTier(settings, self.shelf, secret, RUN, lambda event: None)
        self.arenas: dict[tuple[int, int], MemoryFile] = {}

    def address(self) -> str:
        return self.peers.address

    def begin(self, layout: int, generation: int) -> None:
        self.topology = states.topology(layout, generation)
        self.shelf.open_generation(generation, self.topology, states.TABLE)
        self.peers.begin_generation(self.topology, states.TABLE)

    def put(self, step: int) -> None:
        snapshots = [self._put(step, rank) for rank in range(self.topology.world_size)]
        for snapshot in snapshots:
            self.peers.on_snapshot_stored(snapshot)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.peers.status()["sends"]["stage"]
        return found

    def _put(self, step: int, rank: int) -> Snapshot:
        generation = self.topology.generation
        tensors = states.owned(self.topology, rank)
        data, start = states.blob(step, tensors)
        memory = self.arenas.get((generation, rank))
        if memory is None:
            memory = MemoryFile(Arena.create("own", 3, slot_capacity(len(data))))
            self.arenas[generation, rank] = memory
        slot = memory.arena.free_slot()
        if slot is None:
            raise WrongError(f"rank {rank} finds no free slot for step {step}")
        memory.arena.begin_write(slot)
        memory.arena.data(slot, len(data))[:] = data
        hasher = ExtentHasher(EXTENT_BYTES)
        for _ in hasher.pass_through([memoryview(data)]):
            pass
        made = memory.arena.finish_write(
            slot, identity_digest(RUN), generation, step, len(data), identity_digest(data[:start])
        )
        blob = hasher.finish(blob_key(generation, step, writer_name(rank)), start)
        part = PartManifest(generation, step, rank, blob, tensors, {"position": 16 * step})
        snapshot = Snapshot(part, part.to_bytes(), memory, slot, made)
        self.shelf.put(snapshot)
        return snapshot


class Keeper:
    """A staging machine, and what may be done to what it keeps."""

    def __init__(self, secret: Secret, port: int = 0) -> None:
        self.stage = StagingNode(socket.create_server(("127.0.0.1", port)), secret, ROOM)

    def address(self) -> str:
        return self.stage.address

    def status(self) -> dict[str, Any]:
        return self.stage.status()

    def steps(self) -> list[list[int]]:
        return [
            [line.generation, line.step, line.rank]
            for line in self.stage.snapshot_store.inventory()
        ]

    def flip(self, generation: int, step: int, rank: int, at: int, bit: int) -> int:
        """One bit of a copy; where, modulo its size."""
        found = self.stage.snapshot_store.get(generation, step, rank)
        at %= found.header.length
        found.memory.arena.memory[found.memory.arena.data_offset(found.slot) + at] ^= 1 << bit
        return at

    def replay(self, generation: int, step: int, rank: int, older: int) -> None:
        """The bytes of an older step in the slot of a newer one, under its header."""
        new, old = (self.stage.snapshot_store.get(generation, s, rank) for s in (step, older))
        length = min(new.header.length, old.header.length)
        new.memory.arena.data(new.slot, length)[:] = old.memory.arena.data(old.slot, length)

    def relabel(self, generation: int, step: int, rank: int, older: int) -> None:
        """The sealed part of an older step in the place of a newer one's."""
        new, old = (self.stage.snapshot_store.get(generation, s, rank) for s in (step, older))
        self.stage.snapshot_store.put(replace(new, sealed_manifest=old.sealed_manifest))

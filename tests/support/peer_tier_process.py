"""A mover's tier 1 alone, as a process: `python -m tests.support.peer_tier_process`.

Reads one JSON line of settings on stdin, then commands, and answers each with one line. It holds
its own ranks' snapshots as a mover does (arena, seqlock, snapshot store). It needs no torch,
because a tensor's content after a step is arithmetic.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from holdfast.checkpoint.format.blob import ExtentHasher, blob_header, blob_size
from holdfast.checkpoint.memory.arena import Arena, identity_digest, slot_capacity
from holdfast.checkpoint.memory.snapshot_store import MemoryFile, Snapshot, SnapshotStore
from holdfast.checkpoint.peers.config import PeerSettings
from holdfast.checkpoint.peers.peer_tier import PeerTier
from holdfast.checkpoint.peers.source import PeerMemories
from holdfast.core.format.manifest import PartManifest, blob_key, place_boxes, writer_name
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.ownership import owned_boxes
from holdfast.core.sharding.state_table import ITEM_BYTES, StateTable, TensorSpec
from holdfast.events import Event
from holdfast.layout import Topology
from holdfast.wire.secret import Secret


def content(step: int, box: Box, item: int, shape: tuple[int, ...]) -> bytes:
    """Return a box's bytes. Byte i of the complete tensor is a function of i, the name and the
    step. A tensor named frozen does not depend on the step."""
    step = 0 if "frozen" in box.name else step
    count = int(np.prod(shape, dtype=np.int64)) * item
    whole = (np.arange(count, dtype=np.uint32) * 2654435761 + 97 * step + len(box.name)) >> 13
    array = whole.astype(np.uint8).reshape(*shape, item)
    cut = tuple(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True))
    return np.ascontiguousarray(array[cut]).tobytes()


class Node:
    """The state of the process."""

    def __init__(self, boot: Mapping[str, Any]) -> None:
        self.secret = Secret.from_hex(boot["secret"])
        self.extent_bytes, self.slots = int(boot["extent_bytes"]), int(boot.get("slots", 3))
        self.shelf = SnapshotStore()
        self.events: list[dict[str, Any]] = []
        self.peers = PeerTier(
            PeerSettings.from_json(boot["settings"]), self.shelf, self.secret, "", self._event
        )
        self.arenas: dict[tuple[int, int], MemoryFile] = {}
        self.topology: Topology | None = None
        self.table: StateTable = ()

    def _event(self, event: Event) -> None:
        self.events.append({"kind": event.kind, **vars(event)})

    def begin(self, topology: dict[str, Any], table: list[list[Any]]) -> None:
        self.topology = Topology.from_json(topology)
        self.table = tuple(TensorSpec.from_json(row) for row in table)
        self.shelf.open_generation(self.topology.generation, self.topology, self.table)
        self.peers.begin_generation(self.topology, self.table)

    def put(self, step: int, ranks: list[int]) -> list[int]:
        """Capture a step; the ranks that found no free slot."""
        assert self.topology is not None
        skipped = [rank for rank in ranks if not self._put(step, rank)]
        for rank in set(ranks) - set(skipped):
            self.peers.on_snapshot_stored(self.shelf.get(self.topology.generation, step, rank))
        return skipped

    def _put(self, step: int, rank: int) -> bool:
        assert self.topology is not None
        generation = self.topology.generation
        tensors = place_boxes(owned_boxes(self.topology, self.table, rank), self.table)
        head = blob_header(tensors)
        size = blob_size(head, tensors)
        memory = self.arenas.get((generation, rank))
        if memory is None:
            memory = MemoryFile(Arena.create("own", self.slots, slot_capacity(size)))
            self.arenas[generation, rank] = memory
        slot = memory.arena.free_slot()
        if slot is None:
            return False
        memory.arena.begin_write(slot)
        view = memory.arena.data(slot, size)
        view[: len(head)] = head
        specs = {spec.name: spec for spec in self.table}
        for p in tensors:
            start = len(head) + p.start
            view[start : start + p.nbytes] = content(
                step, p.box, ITEM_BYTES[p.dtype], specs[p.box.name].shape
            )
        hasher = ExtentHasher(self.extent_bytes)
        for _ in hasher.pass_through([view]):
            pass
        view.release()
        made = memory.arena.finish_write(
            slot, identity_digest("test"), generation, step, size, identity_digest(head)
        )
        blob = hasher.finish(blob_key(generation, step, writer_name(rank)), len(head))
        part = PartManifest(generation, step, rank, blob, tensors, {"position": step})
        self.shelf.put(Snapshot(part, part.to_bytes(), memory, slot, made))
        return True

    def memories(self, generation: int) -> list[list[Any]]:
        """What a restart would find in the peers' memory."""
        found = PeerMemories(self.peers.settings.peers, self.secret, lambda: generation)
        return [list(line[:3]) for line in found.inventory()]

    def flip(self, generation: int, step: int, rank: int) -> None:
        """Rot: one bit of what lies here changes after it was hashed."""
        found = self.shelf.get(generation, step, rank)
        at = found.memory.arena.data_offset(found.slot) + found.part.blob.size - 5
        found.memory.arena.memory[at] ^= 1

    def answer(self, command: dict[str, Any]) -> Any:
        match command.pop("do"):
            case "begin":
                self.begin(**command)
            case "put":
                return self.put(**command)
            case "flip":
                self.flip(**command)
            case "inventory":
                return [list(line[:4]) for line in self.shelf.inventory()]
            case "complete":
                return self.shelf.complete_steps()
            case "memories":
                return self.memories(**command)
            case "status":
                return self.peers.status()
            case "events":
                return self.events
            case verb:
                raise ValueError(verb)
        return None


def main() -> None:
    node = Node(json.loads(sys.stdin.readline()))
    print(json.dumps({"address": node.peers.address, "pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        print(json.dumps(node.answer(json.loads(line))), flush=True)
    node.peers.close()


if __name__ == "__main__":
    main()

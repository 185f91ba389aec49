"""Nodes with a tier 1, as processes, and what a restore reads from them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from holdfast.checkpoint.peers.config import Peer, PeerSettings
from holdfast.checkpoint.peers.messages import GenerationPlan, Offer
from holdfast.checkpoint.peers.source import PeerSource
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.sources import FallbackReader
from holdfast.core.format.manifest import PartManifest, merge_parts
from holdfast.core.json_parsing import JsonObject
from holdfast.core.sharding.state_table import ITEM_BYTES, StateTable, TensorSpec, local_boxes
from holdfast.layout import Layout, Topology, place_layout
from holdfast.policy.placement import Machine
from holdfast.wire.secret import Secret
from tests.support.peer_tier_process import content

SECRET = Secret(bytes(range(32)))
TABLE: StateTable = (
    TensorSpec("model.w", "F32", (64, 96), 0),
    TensorSpec("model.frozen", "F32", (96, 64), 0),
    TensorSpec("model.scale", "F64", (), None),
)
EXTENT = 4096


def topology(generation: int = 1, replicas: int = 1, dp_shard: int = 1) -> Topology:
    layout = Layout(dp_replicate=replicas, dp_shard=dp_shard)
    return place_layout(layout, generation, ("node0",) * layout.world_size)


def offer_of(part: bytes, source: str, topo: Topology, ranks: Sequence[int] = (0,)) -> JsonObject:
    """The body of an offer, with who writes."""
    plan = GenerationPlan(topo, TABLE)
    return Offer(part.decode(), "", source, tuple(ranks), plan).to_json()


class Node:
    """One process, its standard input and output."""

    def __init__(
        self,
        *peers: Node | Peer,
        secret: Secret = SECRET,
        extent_bytes: int = EXTENT,
        name: str = "self",
        room: int = 1 << 28,
        slots: int = 3,
        **settings: Any,
    ) -> None:
        known = tuple(
            peer if isinstance(peer, Peer) else Peer(Machine(peer.name), peer.address)
            for peer in peers
        )
        told = PeerSettings(Machine(name), known, room=room, **settings)
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.peer_tier_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        boot = {
            "secret": secret.hex(),
            "extent_bytes": extent_bytes,
            "slots": slots,
            "settings": told.to_json(),
        }
        self.address = str(self._exchange(boot)["address"])
        self.world = 0

    def do(self, verb: str, **arguments: Any) -> Any:
        return self._exchange({"do": verb, **arguments})

    def begin(self, topo: Topology, table: StateTable = TABLE) -> None:
        self.world = topo.world_size
        rows = [spec.to_json() for spec in table]
        self.do("begin", topology=topo.to_json(), table=rows)

    def put(self, step: int, ranks: Sequence[int] | None = None) -> list[int]:
        skipped: list[int] = self.do("put", step=step, ranks=list(ranks or range(self.world)))
        return skipped

    def kept(self, peer: str) -> tuple[int, int]:
        """Return the newest (generation, step) that a peer has completely."""
        generation, step = self.do("status")["sends"][peer]["kept"]
        return generation, step

    def has(self) -> list[tuple[int, int, int]]:
        return [(g, s, r) for g, s, r, _ in self.do("inventory")]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(120)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _exchange(self, value: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def restored(source: PeerSource, generation: int, step: int) -> Checkpoint:
    """The step as a peer's memory has it."""
    topo, table = source.topology_and_table(generation)
    parts = {
        line.rank: (PartManifest.from_bytes(line.sealed_manifest, "test"), line.sealed_manifest)
        for line in source.inventory()
        if (line.generation, line.step) == (generation, step)
    }
    return Checkpoint(FallbackReader([source]), merge_parts(parts, topo, table, "c", "d"))


def assert_holds(found: Checkpoint, onto: Topology, step: int) -> int:
    """Every rank of another layout gets the bytes of `step`, box by box and in one pass; how many
    bytes that were."""
    shapes = {spec.name: spec for spec in found.tensors}
    count = 0
    for rank in range(onto.world_size):
        boxes = [box for box in local_boxes(onto, found.commit.table, rank) if box.size]
        items = [ITEM_BYTES[shapes[box.name].dtype] for box in boxes]
        outs = [bytearray(box.size * item) for box, item in zip(boxes, items, strict=True)]
        found.read_all(zip(boxes, map(memoryview, outs), strict=True))
        for box, item, out in zip(boxes, items, outs, strict=True):
            assert bytes(out) == content(step, box, item, shapes[box.name].shape), box
            found.read(box, memoryview(out))
            assert bytes(out) == content(step, box, item, shapes[box.name].shape), box
            count += len(out)
    return count

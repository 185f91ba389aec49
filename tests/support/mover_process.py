"""A real mover process and small states for the tests of this room."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

from holdfast.checkpoint.capture.capturer import Capturer, CompletedCapture
from holdfast.checkpoint.capture.copy_plan import view_of
from holdfast.checkpoint.format.blob import blob_header
from holdfast.checkpoint.format.save_context import SaveContext
from holdfast.checkpoint.mover.client import MoverClient
from holdfast.checkpoint.mover.main import MoverSpec
from holdfast.checkpoint.mover.service import MoverSettings
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.verify import find_newest_verified
from holdfast.checkpoint.save.writer import write_part
from holdfast.core.format.manifest import place_boxes
from holdfast.core.sharding.boxes import Box, whole_box
from holdfast.core.sharding.ownership import owned_boxes
from holdfast.core.sharding.state_table import StateTable, TensorSpec, local_boxes
from holdfast.events import CheckpointUploaded, Event
from holdfast.layout import Layout, Topology, place_layout
from holdfast.policy.saving.destinations import SaveDestinations
from holdfast.wire.secret import Secret
from holdfast.wire.store.location import open_store
from holdfast.wire.store.run_store import FolderStore, RunStore
from holdfast.wire.term import create_generation, newest_generation

TABLE: StateTable = (
    TensorSpec("model.embed.weight", "F32", (37, 8), 0),
    TensorSpec("model.norm.weight", "F32", (8,), 0),
    TensorSpec("model.layers.0.ffn.up.weight", "F32", (24, 8), 0),
    TensorSpec("optimizer.exp_avg.embed.weight", "F32", (37, 8), 0),
    TensorSpec("model.half", "BF16", (5, 3), 0),
    TensorSpec("model.scale", "F64", (), None),
)
DTYPE = {
    "F32": torch.float32,
    "F64": torch.float64,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "U8": torch.uint8,
}


def topology(replicas: int = 1, dp_shard: int = 1, generation: int = 1) -> Topology:
    layout = Layout(dp_replicate=replicas, dp_shard=dp_shard)
    return place_layout(layout, generation, ("node0",) * layout.world_size)


def state(step: int, table: StateTable = TABLE) -> dict[str, torch.Tensor]:
    """The global state after `step`: every tensor, in full, different at every step."""
    made = {}
    for number, spec in enumerate(table):
        generator = torch.Generator().manual_seed(1000 * step + number)
        full = torch.randn(spec.shape, generator=generator, dtype=torch.float64)
        made[spec.name] = (full.abs() if spec.dtype == "U8" else full).to(DTYPE[spec.dtype])
    return made


class RankState:
    """One rank's tensors."""

    def __init__(self, topo: Topology, rank: int, table: StateTable = TABLE) -> None:
        self.table = table
        self.boxes = local_boxes(topo, table, rank)
        dtypes = {spec.name: DTYPE[spec.dtype] for spec in table}
        self.tensors = {b.name: torch.zeros(b.lengths, dtype=dtypes[b.name]) for b in self.boxes}

    def compute(self, step: int) -> None:
        """Take a step: the tensors now hold their part of `state(step)`."""
        full = state(step, self.table)
        for box in self.boxes:
            everything = whole_box(box.name, tuple(full[box.name].shape))
            self.tensors[box.name].copy_(view_of(full[box.name], everything, box))


class Rank(RankState):
    """And its capturer."""

    def __init__(
        self,
        client: MoverClient,
        topo: Topology,
        rank: int,
        table: StateTable = TABLE,
        slots: int = 2,
        let_go: bool = False,
    ) -> None:
        super().__init__(topo, rank, table)
        self.client = client
        self.capturer = Capturer(
            client,
            topo,
            table,
            rank,
            self.tensors,
            run="test",
            slots=slots,
            has_released_old_memory=let_go,
        )

    def hand_over(self, step: int, durable: bool = True) -> None:
        """Capture and announce; a snapshot that is not `durable` is to stay in memory."""
        assert isinstance(self.capturer.capture(step, wait=60), CompletedCapture)
        meta, destinations = {"position": 16 * step}, SaveDestinations(durable)
        assert self.capturer.announce(step, meta, destinations) is None

    def settle(self, step: int) -> str | None:
        """Wait for the end of a save; return why it is not committed."""
        return self.capturer.wait_until_committed(step, 60)


class Workers:
    """All ranks of a generation in this process."""

    def __init__(
        self,
        client: MoverClient,
        topo: Topology,
        table: StateTable = TABLE,
        slots: int = 2,
        let_go: bool = False,
    ) -> None:
        self.client, self.topology, self.table = client, topo, table
        self.ranks = [Rank(client, topo, n, table, slots, let_go) for n in range(topo.world_size)]
        self.tensors = [rank.tensors for rank in self.ranks]
        self.capturers = [rank.capturer for rank in self.ranks]

    def compute(self, step: int) -> None:
        for rank in self.ranks:
            rank.compute(step)

    def save(self, step: int) -> None:
        """Compute, capture and announce on every rank."""
        self.compute(step)
        for capturer in self.capturers:
            assert isinstance(capturer.capture(step, wait=60), CompletedCapture)
        for capturer in self.capturers:
            assert capturer.announce(step, {"position": 16 * step}) is None

    def commit(self, step: int) -> None:
        self.save(step)
        reason = self.ranks[0].settle(step)
        assert reason is None, reason


class Mover:
    """A mover process and its private folder."""

    def __init__(
        self,
        folder: Path | str,
        secret: Secret | None = None,
        peers: Mapping[str, Any] | None = None,
        socket: str | None = None,
        **settings: Any,
    ) -> None:
        """socket: where one listened that has ended."""
        self.store: Any = open_store(folder)
        self.secret = secret or Secret(secrets.token_bytes(32))
        self.private = tempfile.mkdtemp(prefix="hf-")
        options: dict[str, Any] = {
            "extent_bytes": 1024,
            "run": "test",
            "config_hash": "c",
            "dataset_version": "d",
        }
        boot = MoverSpec(
            str(folder),
            socket or f"{self.private}/mover.sock",
            MoverSettings(**(options | settings)),
            self.secret.hex(),
            peers=None if peers is None else dict(peers),
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.checkpoint.mover.main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(boot.to_json_line())
        self.process.stdin.close()
        assert json.loads(self.process.stdout.readline())["ready"]
        self.socket = boot.socket

    def client(self, generation: int) -> MoverClient:
        return MoverClient(self.socket, self.secret, generation)

    def begin(self, topo: Topology, table: StateTable = TABLE) -> MoverClient:
        """Open the topology's generation, as the agent does."""
        if newest_generation(self.store) < topo.generation:
            create_generation(self.store, topo.generation, {})
        client = self.client(topo.generation)
        client.expect(topo, table)
        return client

    def workers(
        self, replicas: int = 1, dp_shard: int = 1, generation: int = 1, slots: int = 2
    ) -> Workers:
        """The ranks of a generation that has begun."""
        topo = topology(replicas, dp_shard, generation)
        return Workers(self.begin(topo), topo, slots=slots)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(120)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(120)
        if self.process.stdout is not None:
            self.process.stdout.close()
        shutil.rmtree(self.private, ignore_errors=True)


Start = Callable[..., Mover]
"""Starts a mover on the test's run folder."""


def events_until(client: MoverClient, last: Callable[[Event], bool]) -> list[Event]:
    """All events up to the one that is waited for."""
    events: list[Event] = []
    mark, deadline = 0, time.monotonic() + 60
    while not any(map(last, events)):
        assert time.monotonic() < deadline, events
        new, mark = client.events(mark, 60)
        events += new
    return events


def uploaded(step: int) -> Callable[[Event], bool]:
    """The event that the bucket has a step."""
    return lambda event: isinstance(event, CheckpointUploaded) and event.step == step


def read_box(checkpoint: Checkpoint, box: Box) -> torch.Tensor:
    """A box of a checkpoint as a tensor."""
    out = torch.empty(box.lengths, dtype=DTYPE[checkpoint.spec(box.name).dtype])
    if box.size:
        checkpoint.read(box, out.reshape(-1).view(torch.uint8).numpy().data)
    return out


def assert_reads(
    checkpoint: Checkpoint, boxes: Sequence[Box], step: int, table: StateTable = TABLE
) -> None:
    """These boxes, read in one pass, are those of the state after `step`."""
    full = state(step, table)
    outs = [torch.zeros(box.lengths, dtype=full[box.name].dtype) for box in boxes]
    checkpoint.read_all(
        (box, out.reshape(-1).view(torch.uint8).numpy().data if box.size else memoryview(b""))
        for box, out in zip(boxes, outs, strict=True)
    )
    for box, out in zip(boxes, outs, strict=True):
        at = tuple(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True))
        assert torch.equal(out, full[box.name][at]), box


def assert_holds(checkpoint: Checkpoint, step: int, table: StateTable = TABLE) -> None:
    """The checkpoint is, bit for bit, the state after `step`."""
    assert checkpoint.step == step
    for name, full in state(step, table).items():
        assert torch.equal(read_box(checkpoint, whole_box(name, tuple(full.shape))), full), name


def write_noise(store: RunStore, plan: SaveContext, step: int, rank: int, seed: object = 0) -> None:
    """What a mover writes for a rank, of random bytes."""
    tensors = place_boxes(owned_boxes(plan.topology, plan.table, rank), plan.table)
    head = blob_header(tensors)
    data = [Random(f"{seed} {p.box.name}").randbytes(p.nbytes) for p in tensors]
    write_part(store, plan, step, rank, [head, *data], len(head), tensors, {})


def newest_verified(
    store: RunStore, rejected: Callable[[str, str], object] = lambda key, reason: None
) -> Checkpoint:
    """The checkpoint that a restart would take. There is one."""
    found = find_newest_verified(store, rejected)
    assert found is not None
    return found


def files(store: FolderStore) -> list[str]:
    """Every file of the run folder, temporary ones included."""
    found = []
    for base, _, names in os.walk(store.folder):
        found += [os.path.relpath(os.path.join(base, name), store.folder) for name in names]
    return sorted(found)

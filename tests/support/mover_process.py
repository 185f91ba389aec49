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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint.capture.capturer import Capturer, CompletedCapture
from holdfast.checkpoint.capture.copy_plan import view_of
from holdfast.checkpoint.mover.client import MoverClient
from holdfast.checkpoint.mover.main import MoverSpec
from holdfast.checkpoint.mover.service import MoverSettings
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.core.sharding.boxes import Box, whole_box
from holdfast.core.sharding.state_table import StateTable, TensorSpec, local_boxes
from holdfast.events import Event
from holdfast.layout import Layout, Topology, place_layout
from holdfast.wire.secret import Secret
from holdfast.wire.store.location import open_store
from holdfast.wire.store.run_store import FolderStore
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


class Workers:
    """All ranks of a generation in this process: local tensors, and a Capturer for each."""

    def __init__(
        self,
        client: MoverClient,
        topo: Topology,
        table: StateTable = TABLE,
        slots: int = 2,
        let_go: bool = False,
    ) -> None:
        self.topology, self.table = topo, table
        self.tensors: list[dict[str, torch.Tensor]] = []
        self.capturers: list[Capturer] = []
        self.boxes = [local_boxes(topo, table, r) for r in range(topo.world_size)]
        dtypes = {spec.name: DTYPE[spec.dtype] for spec in table}
        for rank in range(topo.world_size):
            local = {b.name: torch.zeros(b.lengths, dtype=dtypes[b.name]) for b in self.boxes[rank]}
            self.tensors.append(local)
            self.capturers.append(
                Capturer(
                    client,
                    topo,
                    table,
                    rank,
                    local,
                    run="test",
                    slots=slots,
                    has_released_old_memory=let_go,
                )
            )

    def compute(self, step: int) -> None:
        """Take a step: every rank's tensors now hold its part of `state(step)`."""
        full = state(step, self.table)
        for local, boxes in zip(self.tensors, self.boxes, strict=True):
            for box in boxes:
                all_of_it = whole_box(box.name, tuple(full[box.name].shape))
                local[box.name].copy_(view_of(full[box.name], all_of_it, box))

    def save(self, step: int, meta: Mapping[str, Any] | None = None) -> None:
        """Compute, capture and announce on every rank."""
        self.compute(step)
        for capturer in self.capturers:
            assert isinstance(capturer.capture(step, wait=60), CompletedCapture)
        for capturer in self.capturers:
            assert capturer.announce(step, meta or {"position": 16 * step}) is None

    def commit(self, step: int) -> None:
        self.save(step)
        reason = self.capturers[0].wait_until_committed(step, 60)
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


def events_until(client: MoverClient, last: Callable[[Event], bool]) -> list[Event]:
    """All events up to the one that is waited for."""
    events: list[Event] = []
    mark, deadline = 0, time.monotonic() + 60
    while not any(map(last, events)):
        assert time.monotonic() < deadline, events
        new, mark = client.events(mark, 60)
        events += new
    return events


def read_box(checkpoint: Checkpoint, box: Box) -> torch.Tensor:
    """A box of a checkpoint as a tensor."""
    out = torch.empty(box.lengths, dtype=DTYPE[checkpoint.spec(box.name).dtype])
    if box.size:
        checkpoint.read(box, out.reshape(-1).view(torch.uint8).numpy().data)
    return out


def assert_holds(checkpoint: Checkpoint, step: int, table: StateTable = TABLE) -> None:
    """The checkpoint is, bit for bit, the state after `step`."""
    assert checkpoint.step == step
    for name, full in state(step, table).items():
        assert torch.equal(read_box(checkpoint, whole_box(name, tuple(full.shape))), full), name


def files(store: FolderStore) -> list[str]:
    """Every file of the run folder, temporary ones included."""
    found = []
    for base, _, names in os.walk(store.folder):
        found += [os.path.relpath(os.path.join(base, name), store.folder) for name in names]
    return sorted(found)

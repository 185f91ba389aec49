"""Cost of a checkpoint's commit object at scale: `python -m benchmarks.runtime.manifest`.

Nothing is saved. The real code derives the boxes of every rank, places them, and merges the parts
of all writers. Then it encodes the commit object, opens it, and finds what one rank reads. The
checksums are made up (they are as long as real ones). The default is a Llama-like decoder of 1 T
parameters with AdamW in fp32 on 16,384 ranks: 4 replicas of pp 16, dp_shard 32, tp 8.

Seconds are CPU seconds of this one process (time.process_time); wall seconds are shown too. The
bars are 100 MB, and 10 s for planning. Planning is table and topology, parsing the part manifests
of all ranks, merging, encoding, opening, and what one rank reads. (Merging derives and places the
boxes of all ranks again, and compares them with the parts.) Steps in brackets are shown and not
counted twice: boxes and placing alone.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

from tests.support.memory_store import MemoryStore

from holdfast.checkpoint.format.blob import blob_header
from holdfast.checkpoint.format.box_index import BoxIndex
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.save.writer import gc_paused
from holdfast.config.sections.model import ModelConfig
from holdfast.core.format.manifest import (
    Blob,
    PartManifest,
    blob_key,
    merge_parts,
    place_boxes_as,
    writer_name,
)
from holdfast.core.sharding.ownership import Ownership
from holdfast.core.sharding.parameters import count_parameters
from holdfast.core.sharding.state_table import StateTable, local_boxes, state_table
from holdfast.layout import Layout, Topology, place_layout

EXTENT = 16 * 2**20
MODEL = {
    "layers": 176,
    "dim": 22528,
    "heads": 176,
    "kv_heads": 16,
    "ffn_dim": 67584,
    "vocab_size": 131072,
}


class Steps:
    """CPU and wall seconds of each step."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[float, float]] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        cpu, wall = time.process_time(), time.perf_counter()
        yield
        self.rows[name] = (time.process_time() - cpu, time.perf_counter() - wall)


def parts_of(
    topology: Topology, table: StateTable, steps: Steps
) -> dict[int, tuple[PartManifest, bytes]]:
    """Every writer's part, as it would be read from the run store."""
    with steps.step("(boxes of all ranks)"):
        owned = dict(Ownership(topology, table).by_rank())
    with steps.step("(placing)"):
        dtypes = {spec.name: spec.dtype for spec in table}
        layouts = {rank: place_boxes_as(boxes, dtypes) for rank, boxes in owned.items()}
    stored: dict[int, bytes] = {}
    for rank, tensors in layouts.items():
        size = (start := len(blob_header(tensors))) + tensors[-1].start + tensors[-1].nbytes
        seed = blake2b(str(rank).encode()).hexdigest()
        sums = tuple(f"{seed[:24]}{i:08x}" for i in range(-(-size // EXTENT)))
        blob = Blob(blob_key(1, 1000, writer_name(rank)), size, start, EXTENT, sums)
        stored[rank] = PartManifest(1, 1000, rank, blob, tensors, {"position": 1}).to_bytes()
    del layouts, owned
    with steps.step("parsing all parts"), gc_paused():
        return {
            rank: (PartManifest.from_bytes(data, "part"), data) for rank, data in stored.items()
        }


def measure(layout: Layout, model: ModelConfig, per_node: int) -> dict[str, object]:
    steps = Steps()
    with steps.step("table and topology"):
        table = state_table(model, "bf16")
        nodes = tuple(f"node-{rank // per_node:05d}" for rank in range(layout.world_size))
        topology = place_layout(layout, 1, nodes)
    parts = parts_of(topology, table, steps)
    part_bytes = sum(len(data) for _, data in parts.values())
    with steps.step("merging"), gc_paused():
        commit = merge_parts(parts, topology, table, "0" * 32, "0" * 32)
    del parts
    with steps.step("encoding"):
        data = commit.to_bytes()
    store = MemoryStore()
    store.create(commit.key, data)
    with steps.step("opening"):
        opened = Checkpoint.open(store, commit.key)
    with steps.step("finding what one rank reads"):
        wanted = [b for b in local_boxes(topology, table, layout.world_size // 2) if b.size]
        index = BoxIndex(opened.commit)
        found = sum(len(index.find_stored(box)) for box in wanted)
    planned = {name: row for name, row in steps.rows.items() if not name.startswith("(")}
    return {
        "parameters": count_parameters(model),
        "state_bytes": commit.nbytes,
        "ranks": topology.world_size,
        "tensors": len(table),
        "commit_object_bytes": len(data),
        "parts_bytes": part_bytes,
        "boxes_of_one_rank": len(wanted),
        "stored_boxes_it_reads": found,
        "cpu_seconds": {name: round(row[0], 3) for name, row in steps.rows.items()},
        "wall_seconds": {name: round(row[1], 3) for name, row in steps.rows.items()},
        "planned_cpu_seconds": round(sum(row[0] for row in planned.values()), 3),
        "planned_wall_seconds": round(sum(row[1] for row in planned.values()), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--pp", type=int, default=16)
    parser.add_argument("--dp-shard", type=int, default=32)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--layers", type=int, default=MODEL["layers"])
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    model = ModelConfig.model_validate({"preset": None, **MODEL, "layers": options.layers})
    per_stage, more = divmod(options.layers, options.pp)
    stages = tuple(per_stage + (stage < more) for stage in range(options.pp))
    layout = Layout(
        options.replicas,
        options.pp,
        options.dp_shard,
        1,
        options.tp,
        stages if options.pp > 1 else (),
    )
    found = measure(layout, model, options.ranks_per_node)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        if name == "wall_seconds":
            continue
        if name == "cpu_seconds":
            for step, seconds in found["cpu_seconds"].items():  # type: ignore[attr-defined]
                wall = found["wall_seconds"][step]  # type: ignore[index]
                print(f"  {step:32} {seconds:8.2f} s CPU {wall:8.2f} s wall")
        else:
            print(f"{name:34} {value:,}")


if __name__ == "__main__":
    main()

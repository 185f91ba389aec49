"""Known tensors: what every step's state is, as bytes, on whatever layout.

The bytes of a tensor after a step are a function of (step, tensor) alone. So a restored state can
be compared with the written one without trust in anything stored. No torch.
"""

from __future__ import annotations

import random
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.format.blob import blob_header
from holdfast.core.format.manifest import PlacedBox, place_boxes
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.ownership import owned_boxes
from holdfast.core.sharding.state_table import ITEM_BYTES, StateTable, TensorSpec
from holdfast.layout import Layout, Topology, place_replicas

TABLE: StateTable = (
    TensorSpec("model.embed.weight", "F32", (48, 8), 0, 0, 48, (-1,)),
    TensorSpec("model.layers.0.q.weight", "F32", (16, 8), 0, 0, 4, (0,)),
    TensorSpec("model.layers.0.o.weight", "F32", (8, 16), 0, 1, 4, (0,)),
    TensorSpec("model.layers.1.up.weight", "F32", (23, 8), 0, 0, 23, (1,)),
    TensorSpec("model.layers.1.norm.weight", "F32", (8,), 0, positions=(1,)),
    TensorSpec("model.half", "BF16", (5, 3), 0),
    TensorSpec("model.scale", "F64", (), None),
    TensorSpec("optimizer.exp_avg.embed.weight", "F32", (48, 8), 0, 0, 48, (-1,)),
    TensorSpec("optimizer.exp_avg.layers.1.up.weight", "F32", (23, 8), 0, 0, 23, (1,)),
)

LAYOUTS: tuple[tuple[Layout, ...], ...] = (
    (Layout(),),
    (Layout(dp_replicate=2),),
    (Layout(dp_shard=3),),
    (Layout(dp_replicate=2, dp_shard=2),),
    (Layout(tp=2),),
    (Layout(pp=2, stages=(1, 1)),),
    (Layout(dp_shard=2, tp=2),),
    (Layout(dp_shard=2), Layout(dp_shard=2), Layout(tp=2)),  # unlike replicas side by side
)


def topology(number: int, generation: int) -> Topology:
    """One of the layouts, placed."""
    layouts = LAYOUTS[number % len(LAYOUTS)]
    world = sum(layout.world_size for layout in layouts)
    return place_replicas(layouts, generation, ("node",) * world)


@lru_cache(maxsize=512)
def _full(step: int, name: str, shape: tuple[int, ...], item: int) -> NDArray[np.uint8]:
    """All bytes of a tensor after a step: [*shape, item]."""
    size = item * int(np.prod(shape, dtype=np.int64))
    data = random.Random(f"{name}/{step}").randbytes(size)
    return np.frombuffer(data, np.uint8).reshape(*shape, item)


def content(step: int, box: Box, table: StateTable = TABLE) -> bytes:
    """The bytes of one box after a step, row-major."""
    spec = next(spec for spec in table if spec.name == box.name)
    full = _full(step, spec.name, spec.shape, ITEM_BYTES[spec.dtype])
    where = tuple(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True))
    return full[where[: len(spec.shape)]].tobytes()


def owned(topo: Topology, rank: int, table: StateTable = TABLE) -> tuple[PlacedBox, ...]:
    """What a rank saves, and where in its blob."""
    return place_boxes(owned_boxes(topo, table, rank), table)


def blob(step: int, tensors: tuple[PlacedBox, ...], table: StateTable = TABLE) -> tuple[bytes, int]:
    """Return a rank's complete blob after a step, and the offset of its data."""
    head = blob_header(tensors)
    return head + b"".join(content(step, p.box, table) for p in tensors), len(head)

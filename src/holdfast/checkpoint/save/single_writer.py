"""A checkpoint written by one process, from tensors that come from elsewhere.

Used to make a step-0 checkpoint out of a Hugging Face folder. Same format, same order of writing,
same fence as a checkpoint of a run: one writer, rank 0, which holds everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from holdfast.checkpoint.format.blob import Bytes, blob_header
from holdfast.checkpoint.format.save_context import SaveContext
from holdfast.checkpoint.save import retention
from holdfast.checkpoint.save.writer import check_fence, try_commit, write_part
from holdfast.core.format.manifest import Commit, PlacedBox, commit_key, place_boxes
from holdfast.core.json_parsing import Json
from holdfast.core.sharding.boxes import whole_box
from holdfast.core.sharding.state_table import TensorSpec
from holdfast.errors import CheckpointError
from holdfast.layout import Layout, place_layout
from holdfast.wire.store.run_store import MissingKeyError, RunStore


class TensorSource(NamedTuple):
    """One tensor: dtype by safetensors' name, global shape, and its bytes, row-major, in chunks
    (which are asked for once, when their turn comes)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Iterable[Bytes]


def write_single(
    store: RunStore,
    generation: int,
    step: int,
    tensors: Iterable[TensorSource],
    meta: Mapping[str, Json],
    *,
    config_hash: str = "",
    dataset_version: str = "",
    shard_dim: int | None = 0,
    extent_bytes: int = 16 * 2**20,
) -> Commit:
    """Write and commit the state after `step`.

    Tensors are kept in the order given. Raises CheckpointError when this step is committed already
    or a tensor's bytes do not match its shape. Raises FencedError when a newer generation exists,
    and what the store raises. After an error nothing is left in the store.
    """
    sources = list(tensors)
    # A scalar has no dim to cut.
    table = tuple(
        TensorSpec(s.name, s.dtype, s.shape, (shard_dim if s.shape else None)) for s in sources
    )
    if len({spec.name for spec in table}) != len(table):
        raise CheckpointError("a tensor's name comes twice")
    if _is_committed(store, commit_key(generation, step)):
        raise CheckpointError(
            f"step {step} of generation {generation} is committed already",
            remedy="import into a run folder that has no checkpoint",
        )
    topology = place_layout(Layout(), generation, ("import",))
    plan = SaveContext(generation, topology, table, config_hash, dataset_version, extent_bytes)
    layout = place_boxes((whole_box(spec.name, spec.shape) for spec in table), table)
    head = blob_header(layout)
    check_fence(store, generation)
    # left by an import that was killed before it ended
    retention.discard_uncommitted(store, generation, step)
    write_part(store, plan, step, 0, _blob_content(head, layout, sources), len(head), layout, meta)
    try:
        commit = try_commit(store, plan, step)
    except Exception:
        retention.discard_uncommitted(store, generation, step)
        raise
    assert commit is not None
    return commit


def _is_committed(store: RunStore, key: str) -> bool:
    try:
        store.size(key)
    except MissingKeyError:
        return False
    return True


def _blob_content(
    head: bytes, layout: Sequence[PlacedBox], sources: Sequence[TensorSource]
) -> Iterator[Bytes]:
    """The blob's bytes, one tensor at a time, in the layout's order."""
    chunks = {source.name: source.chunks for source in sources}
    yield head
    for p in layout:
        count = 0
        for chunk in chunks[p.box.name]:
            count += memoryview(chunk).nbytes
            yield chunk
        if count != p.nbytes:
            raise CheckpointError(f"{p.box.name}: {count} bytes came, {p.nbytes} are due")

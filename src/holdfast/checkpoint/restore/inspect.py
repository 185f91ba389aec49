"""Looking at checkpoints: find one, show what is in it, compare two.

All of it is ranged reads over `Checkpoint`. A comparison walks the first checkpoint in the order of
its blobs, a few megabytes at a time. So each extent is read once and a handful are held, however
large the state is. The second may lie in any other layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.core.format.manifest import Commit, parse_commit_key, place_boxes
from holdfast.core.sharding.boxes import Box, whole_box
from holdfast.core.sharding.ownership import Ownership
from holdfast.core.sharding.state_table import ITEM_BYTES, TensorSpec
from holdfast.errors import CheckpointError
from holdfast.layout import AXES, Topology
from holdfast.wire.store.run_store import RunStore

NEWEST_PATH = "newest"
COMPARE_PIECE_BYTES = 4 * 2**20
"""Compared at a time."""

_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_INTEGERS = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "u1"}
_BITS = {8: "<u8", 4: "<u4", 2: "<u2", 1: "u1"}


def find_commit_key(store: RunStore, which: str) -> str:
    """The key of the newest commit object, or of that of a step: `which` is "newest" or a number.

    Of one step, the newest generation's. Raises CheckpointError when there is none.
    """
    keys = list_commits(store)
    if not keys:
        raise CheckpointError("there is no checkpoint here", remedy="train the run first")
    if which == NEWEST_PATH:
        return keys[0]
    steps = {}
    for key in reversed(keys):
        steps[str((parse_commit_key(key) or (0, 0))[0])] = key
    wanted = str(int(which)) if which.isdecimal() else which
    if wanted not in steps:
        raise CheckpointError(
            f"there is no checkpoint of step {which}",
            remedy=f"name 'newest' or one of these: {', '.join(steps)}",
        )
    return steps[wanted]


# --- show -----------------------------------------------------------------------------------
def commit_to_json(commit: Commit, object_bytes: int) -> dict[str, Any]:
    """Everything that the commit object says, boxes spelled out."""
    tensors: dict[str, dict[str, Any]] = {
        spec.name: {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "bytes": spec.nbytes,
            "boxes": [],
        }
        for spec in commit.table
    }
    writers = []
    owned = dict(Ownership(commit.topology, commit.table).by_rank())
    for writer in commit.writers:
        boxes = owned.get(writer.rank, ())
        for box in boxes:
            tensors[box.name]["boxes"].append(
                {"rank": writer.rank, "offsets": list(box.offsets), "lengths": list(box.lengths)}
            )
        writers.append(
            {
                "rank": writer.rank,
                "node": commit.topology.nodes[writer.rank],
                "blob": writer.blob.key,
                "bytes": writer.blob.size,
                "tensors": len(boxes),
                "checksums": len(writer.blob.checksums),
                "extent_bytes": writer.blob.extent_bytes,
            }
        )
    return {
        "key": commit.key,
        "step": commit.step,
        "generation": commit.generation,
        "config_hash": commit.config_hash,
        "dataset_version": commit.dataset_version,
        "layout": layout_of(commit.topology),
        "world_size": commit.topology.world_size,
        "bytes": commit.nbytes,
        "commit_object_bytes": object_bytes,
        "checksums": sum(len(w.blob.checksums) for w in commit.writers),
        "meta": dict(commit.meta),
        "writers": writers,
        "tensors": tensors,
    }


def layout_of(topology: Topology) -> list[dict[str, Any]]:
    """The kinds of replicas: how many there are of each, their degrees, their stages."""
    kinds = [replica.kind for replica in topology.replicas]
    return [
        {
            "replicas": kinds.count(kind),
            **dict(zip(AXES, kind[0], strict=True)),
            **({"stages": list(kind[1])} if kind[1] else {}),
        }
        for kind in topology.kinds
    ]


# --- diff -----------------------------------------------------------------------------------
@dataclass
class TensorDifference:
    """How one tensor differs. `kind`: only in the first, only in the second, shape, dtype, bytes.

    For `bytes`: how many elements have other bits, and the largest absolute difference among
    those where it is a finite number (`nonfinite_elements` counts the rest).
    """

    name: str
    kind: str
    first: str = ""
    second: str = ""
    elements: int = 0
    total_elements: int = 0
    max_abs: float | None = None
    nonfinite_elements: int = 0


@dataclass
class CheckpointComparison:
    """Differences by tensor; `same_count` counts the tensors that have none."""

    same_count: int = 0
    differences: dict[str, TensorDifference] = field(default_factory=dict)


def compare_checkpoints(
    first: Checkpoint,
    second: Checkpoint,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> CheckpointComparison:
    """Every tensor of both, byte by byte. `progress(done, total)` counts bytes.

    Raises CorruptError when bytes of either are not those that were written.
    """
    found = CheckpointComparison()
    ours = {spec.name: spec for spec in first.tensors}
    theirs = {spec.name: spec for spec in second.tensors}
    alike = set()
    for name in dict.fromkeys((*ours, *theirs)):
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None:
            what = "only in the first" if b is None else "only in the second"
            found.differences[name] = TensorDifference(name, what)
        elif a.shape != b.shape:
            found.differences[name] = TensorDifference(
                name, "shape", str(list(a.shape)), str(list(b.shape))
            )
        elif a.dtype != b.dtype:
            found.differences[name] = TensorDifference(name, "dtype", a.dtype, b.dtype)
        else:
            alike.add(name)
    total = sum(ours[name].nbytes for name in alike)
    done = 0
    for box, dtype in _stored_boxes(first.commit):
        if box.name not in alike:
            continue
        for piece in split_box(box, COMPARE_PIECE_BYTES // ITEM_BYTES[dtype]):
            _compare_piece(first, second, piece, dtype, prod(ours[box.name].shape), found)
            done += piece.size * ITEM_BYTES[dtype]
            on_progress(done, total)
    found.same_count = len(alike - set(found.differences))
    return found


def _stored_boxes(commit: Commit) -> Iterator[tuple[Box, str]]:
    """(box, dtype) of everything that is stored, in the order of the blobs' bytes."""
    ownership = Ownership(commit.topology, commit.table)
    for writer in commit.writers:
        for p in place_boxes(ownership.boxes(writer.rank), commit.table):
            yield p.box, p.dtype


def split_box(box: Box, elements: int) -> Iterator[Box]:
    """A box cut into boxes of at most `elements` (at least 1), in row-major order."""
    if box.size <= max(1, elements):
        if box.size:
            yield box
        return
    dim = next(d for d, length in enumerate(box.lengths) if length > 1)
    rows = max(1, elements // (box.size // box.lengths[dim]))
    for start in range(0, box.lengths[dim], rows):
        offsets, lengths = list(box.offsets), list(box.lengths)
        offsets[dim] += start
        lengths[dim] = min(rows, box.lengths[dim] - start)
        yield from split_box(Box(box.name, tuple(offsets), tuple(lengths)), elements)


def _compare_piece(
    first: Checkpoint,
    second: Checkpoint,
    box: Box,
    dtype: str,
    total_elements: int,
    found: CheckpointComparison,
) -> None:
    item = ITEM_BYTES[dtype]
    a, b = (np.empty(box.size, _BITS[item]) for _ in range(2))
    first.read(box, a.data)
    second.read(box, b.data)
    other = a != b
    count = int(np.count_nonzero(other))
    if not count:
        return
    entry = found.differences.setdefault(
        box.name, TensorDifference(box.name, "bytes", total_elements=total_elements)
    )
    entry.elements += count
    with np.errstate(invalid="ignore", over="ignore"):
        delta = np.abs(_as_float64(a[other], dtype) - _as_float64(b[other], dtype))
    finite = delta[np.isfinite(delta)]
    entry.nonfinite_elements += count - finite.size
    if finite.size:
        entry.max_abs = max(entry.max_abs or 0.0, float(finite.max()))


def read_as_float64(checkpoint: Checkpoint, spec: TensorSpec) -> NDArray[np.float64]:
    """Read all of a tensor of any dtype, in its shape. An integer above 2^53 is rounded.

    Raises CorruptError when its bytes are not those that were written.
    """
    bits = np.empty(prod(spec.shape), _BITS[ITEM_BYTES[spec.dtype]])
    checkpoint.read(whole_box(spec.name, spec.shape), bits.data)
    found: NDArray[np.float64] = _as_float64(bits, spec.dtype).reshape(spec.shape)
    return found


def _as_float64(bits: Any, dtype: str) -> Any:
    """Elements as float64."""
    if dtype == "BF16":  # the upper half of a float32
        return (bits.astype("<u4") << 16).view("<f4").astype("<f8")
    return bits.view((_FLOATS | _INTEGERS)[dtype]).astype("<f8")


def comparison_to_json(comparison: CheckpointComparison) -> dict[str, Any]:
    def row(d: TensorDifference) -> Mapping[str, Any]:
        if d.kind == "bytes":
            return {
                "what": d.kind,
                "elements": d.elements,
                "of": d.total_elements,
                "max_abs": d.max_abs,
                "not_finite": d.nonfinite_elements,
            }
        sides = {"first": d.first, "second": d.second} if d.first else {}
        return {"what": d.kind, **sides}

    return {
        "same": comparison.same_count,
        "differences": {name: dict(row(d)) for name, d in comparison.differences.items()},
    }

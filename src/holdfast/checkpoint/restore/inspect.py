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

from holdfast.checkpoint.restore.catalog import listing
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.core.format.manifest import Commit, parse_commit_key, placed
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.ownership import Ownership
from holdfast.core.sharding.state_table import ITEM_BYTES
from holdfast.errors import CheckpointError
from holdfast.layout import AXES, Topology
from holdfast.wire.store.run_store import RunStore

NEWEST = "newest"
PIECE_BYTES = 4 * 2**20
"""Compared at a time."""

_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_WHOLE = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "u1"}
_BITS = {8: "<u8", 4: "<u4", 2: "<u2", 1: "u1"}


def find(store: RunStore, which: str) -> str:
    """The key of the newest commit object, or of that of a step: `which` is "newest" or a number.

    Of one step, the newest generation's. Raises CheckpointError when there is none.
    """
    keys = listing(store)
    if not keys:
        raise CheckpointError("there is no checkpoint here", remedy="train the run first")
    if which == NEWEST:
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
def show(commit: Commit, object_bytes: int) -> dict[str, Any]:
    """Everything that the commit object says, boxes spelled out."""
    tensors: dict[str, dict[str, Any]] = {
        spec.name: {
            "dtype": spec.dtype, "shape": list(spec.shape), "bytes": spec.nbytes, "boxes": [],
        }
        for spec in commit.table
    }  # fmt: skip
    writers = []
    owned = dict(Ownership(commit.topology, commit.table).all())
    for writer in commit.writers:
        boxes = owned.get(writer.rank, ())
        for box in boxes:
            tensors[box.name]["boxes"].append(
                {"rank": writer.rank, "offsets": list(box.offsets), "lengths": list(box.lengths)}
            )
        writers.append({
            "rank": writer.rank, "node": commit.topology.nodes[writer.rank],
            "blob": writer.blob.key, "bytes": writer.blob.size, "tensors": len(boxes),
            "checksums": len(writer.blob.checksums), "extent_bytes": writer.blob.extent_bytes,
        })  # fmt: skip
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
class Difference:
    """How one tensor differs. `what`: only in the first, only in the second, shape, dtype, bytes.

    For `bytes`: how many elements have other bits, and the largest absolute difference among
    those where it is a finite number (`not_finite` counts the rest).
    """

    name: str
    what: str
    first: str = ""
    second: str = ""
    elements: int = 0
    of: int = 0
    max_abs: float | None = None
    not_finite: int = 0


@dataclass
class Comparison:
    """Differences by tensor; `same` counts the tensors that have none."""

    same: int = 0
    differences: dict[str, Difference] = field(default_factory=dict)


def compare(
    first: Checkpoint,
    second: Checkpoint,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """Every tensor of both, byte by byte. `progress(done, total)` counts bytes.

    Raises CorruptError when bytes of either are not those that were written.
    """
    found = Comparison()
    ours = {spec.name: spec for spec in first.tensors}
    theirs = {spec.name: spec for spec in second.tensors}
    alike = set()
    for name in dict.fromkeys((*ours, *theirs)):
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None:
            what = "only in the first" if b is None else "only in the second"
            found.differences[name] = Difference(name, what)
        elif a.shape != b.shape:
            found.differences[name] = Difference(
                name, "shape", str(list(a.shape)), str(list(b.shape))
            )
        elif a.dtype != b.dtype:
            found.differences[name] = Difference(name, "dtype", a.dtype, b.dtype)
        else:
            alike.add(name)
    total = sum(ours[name].nbytes for name in alike)
    done = 0
    for box, dtype in _boxes(first.commit):
        if box.name not in alike:
            continue
        for piece in pieces_of(box, PIECE_BYTES // ITEM_BYTES[dtype]):
            _compare_piece(first, second, piece, dtype, prod(ours[box.name].shape), found)
            done += piece.size * ITEM_BYTES[dtype]
            progress(done, total)
    found.same = len(alike - set(found.differences))
    return found


def _boxes(commit: Commit) -> Iterator[tuple[Box, str]]:
    """(box, dtype) of everything that is stored, in the order of the blobs' bytes."""
    ownership = Ownership(commit.topology, commit.table)
    for writer in commit.writers:
        for p in placed(ownership.boxes(writer.rank), commit.table):
            yield p.box, p.dtype


def pieces_of(box: Box, elements: int) -> Iterator[Box]:
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
        yield from pieces_of(Box(box.name, tuple(offsets), tuple(lengths)), elements)


def _compare_piece(
    first: Checkpoint, second: Checkpoint, box: Box, dtype: str, of: int, found: Comparison
) -> None:
    item = ITEM_BYTES[dtype]
    a, b = (np.empty(box.size, _BITS[item]) for _ in range(2))
    first.read(box, a.data)
    second.read(box, b.data)
    other = a != b
    count = int(np.count_nonzero(other))
    if not count:
        return
    entry = found.differences.setdefault(box.name, Difference(box.name, "bytes", of=of))
    entry.elements += count
    with np.errstate(invalid="ignore", over="ignore"):
        delta = np.abs(_numbers(a[other], dtype) - _numbers(b[other], dtype))
    finite = delta[np.isfinite(delta)]
    entry.not_finite += count - finite.size
    if finite.size:
        entry.max_abs = max(entry.max_abs or 0.0, float(finite.max()))


def _numbers(bits: Any, dtype: str) -> Any:
    """Elements as float64."""
    if dtype == "BF16":  # the upper half of a float32
        return (bits.astype("<u4") << 16).view("<f4").astype("<f8")
    return bits.view((_FLOATS | _WHOLE)[dtype]).astype("<f8")


def differences_as_json(found: Comparison) -> dict[str, Any]:
    def row(d: Difference) -> Mapping[str, Any]:
        if d.what == "bytes":
            return {
                "what": d.what, "elements": d.elements, "of": d.of, "max_abs": d.max_abs,
                "not_finite": d.not_finite,
            }  # fmt: skip
        sides = {"first": d.first, "second": d.second} if d.first else {}
        return {"what": d.what, **sides}

    return {
        "same": found.same,
        "differences": {name: dict(row(d)) for name, d in found.differences.items()},
    }

"""The objects of a checkpoint as data: keys, blobs, parts and the one commit object.

Format version 2, or 3 where experts are spread; version 1 is read too. A writer (one per rank)
writes one blob, then its part manifest. When the parts of all writers of (generation, step) are
there, they are merged into the commit object. Only that object makes the step a checkpoint.
docs/reference/checkpoint-format.md describes every field.

Manifests stay small because boxes are not listed. The commit holds the topology and the table,
placements once per tensor, and `placed` derives from them where each box lies. Checksums are
xxh3-128 per extent of a blob, and every manifest carries its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import prod
from operator import eq
from typing import Annotated, Any, NamedTuple, Self, cast

from xxhash import xxh3_128_hexdigest

from holdfast.core.json_parsing import JsonMessage, Key, ParsedJson, parse_json
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.ownership import Ownership
from holdfast.core.sharding.state_table import ITEM_BYTES, StateTable, TensorSpec
from holdfast.errors import CheckpointError, CorruptError
from holdfast.layout import Topology

FORMAT = 2
"""2 added to the table which dims tp cuts and which stages hold a tensor, and to the topology the
blocks of each stage. If neither tp nor pp is above 1, both versions place every box alike."""
FORMAT_OF_SPREAD_EXPERTS = 3
"""Of a commit object whose table has rows with `ep`. Without such rows version 2 is the same."""
FORMAT_OF_COMPONENTS = 4
"""Of a commit object whose table has rows with `tp_degree`. Without them 2 or 3 is the same."""
READABLE_FORMATS = (1, FORMAT, FORMAT_OF_SPREAD_EXPERTS, FORMAT_OF_COMPONENTS)
BLOB_ALIGNMENT = 4096
"""Tensor data of a blob starts at a multiple of this many bytes, so that it can be written and
read past the page cache."""

_MAX_U64 = 2**64 - 1
COMMITS_PREFIX = "commits/"

_PARSE_ERRORS = (ValueError, KeyError, TypeError, AttributeError, OverflowError)
"""Errors of reading fields from a JSON value with other fields, or with fields of other types."""


# --- keys -----------------------------------------------------------------------------------
def writer_name(rank: int) -> str:
    return f"rank{rank:05d}"


def blob_key(generation: int, step: int, writer: str, number: int = 0) -> str:
    return f"{data_prefix(generation, step)}{writer}-{number}.safetensors"


def data_prefix(generation: int, step: int) -> str:
    return f"data/{generation:010d}/{step:010d}-"


def part_prefix(generation: int, step: int) -> str:
    return f"parts/{generation:010d}/{step:010d}-"


def part_key(generation: int, step: int, writer: str) -> str:
    return f"{part_prefix(generation, step)}{writer}.json"


def commit_key(generation: int, step: int) -> str:
    """The step is inverted, so that the first key of a listing is the newest."""
    return f"{COMMITS_PREFIX}{_MAX_U64 - step:016x}-{generation:010d}.json"


def parse_commit_key(key: str) -> tuple[int, int] | None:
    """(step, generation), or None for a key that no commit object has."""
    name = key.removeprefix(COMMITS_PREFIX)
    inverted, dash, rest = name.partition("-")
    generation, dot, suffix = rest.partition(".")
    if key == name or len(inverted) != 16 or not dash or not dot or suffix != "json":
        return None
    try:
        step = _MAX_U64 - int(inverted, 16)
        parsed = (step, int(generation))
    except ValueError:
        return None
    return parsed if commit_key(parsed[1], parsed[0]) == key else None


def parse_save_key(key: str) -> tuple[int, int] | None:
    """(step, generation) of a blob's or a part manifest's key, None for any other."""
    kind, _, rest = key.partition("/")
    generation, slash, name = rest.partition("/")
    step, dash, _ = name.partition("-")
    numbers = generation.isdecimal() and step.isdecimal()
    if kind not in ("data", "parts") or not slash or not dash or not numbers:
        return None
    return int(step), int(generation)


def parse_blob_key(key: str) -> tuple[int, int, int] | None:
    """(generation, step, rank) of a rank's blob, None for any other key."""
    position = parse_save_key(key)
    rank = key.rpartition("-rank")[2].partition("-")[0]
    if position is None or not rank.isdecimal():
        return None
    step, generation = position
    is_blob = blob_key(generation, step, writer_name(int(rank))) == key
    return (generation, step, int(rank)) if is_blob else None


# --- blobs ----------------------------------------------------------------------------------
class Extent(NamedTuple):
    """A checksummed range of a blob."""

    offset: int
    length: int
    xxh3: str


@dataclass(frozen=True)
class Blob(JsonMessage):
    """A safetensors file. Extents follow each other from byte 0, `extent_bytes` long, the last
    one shorter; the header of the file is inside the first."""

    key: str
    size: int
    data_start: int
    extent_bytes: int
    checksums: Annotated[tuple[str, ...], Key("xxh3")]

    def extent(self, number: int) -> Extent:
        offset = number * self.extent_bytes
        return Extent(offset, min(self.extent_bytes, self.size - offset), self.checksums[number])

    def extents(self, start: int = 0, stop: int | None = None) -> Iterator[Extent]:
        """The extents that bytes [start, stop) touch."""
        stop = self.size if stop is None else stop
        if start < stop:
            for number in range(start // self.extent_bytes, -(-stop // self.extent_bytes)):
                yield self.extent(number)

    @classmethod
    def from_json(cls, value: ParsedJson) -> Self:
        blob = super().from_json(value)
        if blob.extent_bytes < 1 or len(blob.checksums) != -(-blob.size // blob.extent_bytes):
            raise ValueError(f"{blob.key}: {len(blob.checksums)} checksums for {blob.size} bytes")
        return blob


class PlacedBox(NamedTuple):
    """A box in a blob: its elements lie row-major from byte `start` after the data start."""

    # A tuple, because a large checkpoint makes a million of them at once.
    box: Box
    dtype: str
    start: int

    @property
    def nbytes(self) -> int:
        return self.box.size * ITEM_BYTES[self.dtype]


def place_boxes(boxes: Iterable[Box], table: StateTable) -> tuple[PlacedBox, ...]:
    """Return the place of each box in its writer's blob: wide dtypes first, in the order given
    otherwise. So every tensor is aligned to its own element without gaps (the format allows none).
    """
    return place_boxes_as(boxes, {spec.name: spec.dtype for spec in table})


def place_boxes_as(boxes: Iterable[Box], dtypes: Mapping[str, str]) -> tuple[PlacedBox, ...]:
    """As `placed`, for many writers of one table: name -> dtype."""
    ordered = sorted(boxes, key=lambda box: -ITEM_BYTES[dtypes[box.name]])
    out: list[PlacedBox] = []
    start = 0
    for box in ordered:
        dtype = dtypes[box.name]
        out.append(PlacedBox(box, dtype, start))
        start += box.size * ITEM_BYTES[dtype]
    return tuple(out)


def parse_placed_boxes(rows: Mapping[str, Sequence[Any]]) -> tuple[PlacedBox, ...]:
    """What a list that came from outside says: name -> (dtype, offsets, lengths, start).

    Raises ValueError or TypeError where a box can lie nowhere: offsets, lengths and start are whole
    numbers, none negative, with as many offsets as lengths.
    """
    # Column by column, in few calls: a large checkpoint's parts list a million boxes.
    columns = tuple(zip(*rows.values(), strict=True)) if rows else ((),) * 4
    dtypes, offsets, lengths, starts = columns
    offsets, lengths = tuple(map(tuple, offsets)), tuple(map(tuple, lengths))
    numbers = [*starts, *chain.from_iterable(offsets), *chain.from_iterable(lengths)]
    sound = (
        set(map(type, numbers)) <= {int}  # a bool is none
        and min(numbers, default=0) >= 0
        and all(map(eq, map(len, offsets), map(len, lengths)))
        and set(dtypes) <= ITEM_BYTES.keys()
    )
    if not sound:
        for name, row in rows.items() if len(rows) > 1 else ():
            parse_placed_boxes({name: row})  # names the one that is wrong
        raise ValueError(f"{next(iter(rows))!r} has a strange dtype, or lies nowhere")
    boxes = map(_box, zip(rows, offsets, lengths, strict=True))
    return tuple(map(_placed_box, zip(boxes, dtypes, starts, strict=True)))


# As Box(...) and Placed(...), of a tuple: without a call of Python for each.
_box = cast(Callable[[tuple[Any, ...]], Box], partial(tuple.__new__, Box))
_placed_box = cast(Callable[[tuple[Any, ...]], PlacedBox], partial(tuple.__new__, PlacedBox))


# --- manifests ------------------------------------------------------------------------------
@dataclass(frozen=True)
class PartManifest:
    """The blob of one writer. `tensors` lists its contents in full: name -> (offsets, lengths,
    start)."""

    generation: int
    step: int
    rank: int
    blob: Blob
    tensors: tuple[PlacedBox, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def writer(self) -> str:
        return writer_name(self.rank)

    def to_bytes(self) -> bytes:
        tensors = {
            p.box.name: [p.dtype, list(p.box.offsets), list(p.box.lengths), p.start]
            for p in self.tensors
        }
        return seal_manifest(
            "part",
            {
                "generation": self.generation,
                "step": self.step,
                "rank": self.rank,
                "blob": self.blob.to_json(),
                "tensors": tensors,
                "meta": dict(self.meta),
            },
        )

    @staticmethod
    def from_bytes(data: bytes, where: str) -> PartManifest:
        body = unseal_manifest("part", data, where)
        try:
            return PartManifest(
                body["generation"],
                body["step"],
                body["rank"],
                Blob.from_json(body["blob"]),
                parse_placed_boxes(body["tensors"]),
                body["meta"],
            )
        except _PARSE_ERRORS as error:
            raise CorruptError(f"{where}: not a part manifest: {error}") from error


@dataclass(frozen=True, slots=True)
class WriterShare:
    """One writer's share of a commit: its blob, and the checksum of its part manifest."""

    rank: int
    blob: Blob
    part_xxh3: str


@dataclass(frozen=True)
class Commit:
    """The commit object: all that is needed to read the state after `step`.

    `meta` holds what is state but no tensor: position in the sample order, ledger digest.
    """

    generation: int
    step: int
    config_hash: str
    dataset_version: str
    topology: Topology
    table: StateTable
    writers: tuple[WriterShare, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return commit_key(self.generation, self.step)

    @property
    def nbytes(self) -> int:
        """Bytes of all blobs."""
        return sum(writer.blob.size for writer in self.writers)

    def to_bytes(self) -> bytes:
        return seal_manifest(
            "commit",
            {
                "generation": self.generation,
                "step": self.step,
                "config_hash": self.config_hash,
                "dataset_version": self.dataset_version,
                "topology": self.topology.to_json(),
                "table": [spec.to_json() for spec in self.table],
                "writers": [
                    {"rank": w.rank, "blob": w.blob.to_json(), "part_xxh3": w.part_xxh3}
                    for w in self.writers
                ],
                "meta": dict(self.meta),
            },
            _format_of(self.table),
        )

    @staticmethod
    def from_bytes(data: bytes, where: str) -> Commit:
        body = unseal_manifest("commit", data, where)
        try:
            commit = Commit(
                body["generation"],
                body["step"],
                body["config_hash"],
                body["dataset_version"],
                Topology.from_json(body["topology"]),
                tuple(TensorSpec.from_json(row) for row in body["table"]),
                tuple(
                    WriterShare(w["rank"], Blob.from_json(w["blob"]), w["part_xxh3"])
                    for w in body["writers"]
                ),
                body["meta"],
            )
            key = commit.key
        except _PARSE_ERRORS as error:
            raise CorruptError(f"{where}: not a commit object: {error}") from error
        if key != where:
            raise CorruptError(f"{where}: holds the commit object {key}")
        return commit


def merge_parts(
    parts: Mapping[int, tuple[PartManifest, bytes]],
    topology: Topology,
    table: StateTable,
    config_hash: str,
    dataset_version: str,
) -> Commit:
    """The commit object of complete parts (rank -> manifest and its bytes as stored).

    Raises CheckpointError if a writer is missing, a part does not hold exactly what its rank owns,
    or a tensor is not covered exactly once. Such a checkpoint must not exist.
    """
    missing = sorted(set(range(topology.world_size)) - set(parts))
    if missing or len(parts) != topology.world_size:
        raise CheckpointError(f"parts of ranks {missing} are missing")
    ownership = Ownership(topology, table)
    if problem := ownership.coverage_problem():
        raise CheckpointError(problem)
    owned = dict(ownership.by_rank())
    dtypes = {spec.name: spec.dtype for spec in table}
    left = {spec.name: prod(spec.shape) for spec in table}
    writers: list[WriterShare] = []
    for rank in range(topology.world_size):
        part, stored = parts[rank]
        due = place_boxes_as(owned.get(rank, ()), dtypes)
        if tuple(sorted(part.tensors, key=_start_of)) != due or part.rank != rank:
            raise CheckpointError(f"the part of rank {rank} does not hold what the rank owns")
        need = part.blob.data_start + (due[-1].start + due[-1].nbytes if due else 0)
        if part.blob.size != need:
            raise CheckpointError(f"{part.blob.key} has {part.blob.size} bytes, {need} are due")
        for p in due:
            left[p.box.name] -= p.box.size
        writers.append(WriterShare(rank, part.blob, xxh3_128_hexdigest(stored)))
    for name, elements in left.items():
        if elements:
            raise CheckpointError(f"{name}: {elements} elements are missing")
    first = parts[0][0]
    if {(p.generation, p.step) for p, _ in parts.values()} != {(first.generation, first.step)}:
        raise CheckpointError("parts of different steps or generations do not make a checkpoint")
    meta = next((dict(parts[rank][0].meta) for rank in sorted(parts) if parts[rank][0].meta), {})
    return Commit(
        first.generation,
        first.step,
        config_hash,
        dataset_version,
        topology,
        table,
        tuple(writers),
        meta,
    )


def _start_of(p: PlacedBox) -> int:
    return p.start


# --- sealing --------------------------------------------------------------------------------
def _format_of(table: StateTable) -> int:
    """The oldest version that says all of a table."""
    if any(spec.tp_degree for spec in table):
        return FORMAT_OF_COMPONENTS
    return FORMAT_OF_SPREAD_EXPERTS if any(spec.ep > 1 for spec in table) else FORMAT


def seal_manifest(kind: str, body: Mapping[str, Any], version: int = FORMAT) -> bytes:
    """Return the canonical JSON of a manifest, with its format version. Its own checksum is the
    last key, and covers the bytes before it."""
    content = _canonical_json({"holdfast": kind, "format": version, **body})
    return content[:-1] + _checksum_tail(xxh3_128_hexdigest(content))


def unseal_manifest(kind: str, data: bytes, where: str) -> dict[str, Any]:
    """The body of a sealed manifest.

    Raises CorruptError when any byte differs from what was written, and CheckpointError when a
    newer version wrote it.
    """
    try:
        content = parse_json(data)
        version = content["format"]
        checksum = content.pop("xxh3")
        found = content["holdfast"]
        tail = _checksum_tail(str(checksum))
    except _PARSE_ERRORS as error:
        raise CorruptError(f"{where}: not a manifest") from error
    whole = data.endswith(tail) and xxh3_128_hexdigest(data[: -len(tail)] + b"}") == checksum
    if not whole:
        raise CorruptError(f"{where}: checksum does not match")
    if version not in READABLE_FORMATS:
        raise CheckpointError(
            f"format version {version} is newer than {max(READABLE_FORMATS)}",
            where=where,
            remedy="use the version of Holdfast that wrote it",
        )
    if found != kind:
        raise CorruptError(f"{where}: a {found} manifest where a {kind} manifest belongs")
    return dict(content)


def _checksum_tail(checksum: str) -> bytes:
    return f',"xxh3":"{checksum}"}}'.encode()


def _canonical_json(value: Mapping[str, Any] | Sequence[Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

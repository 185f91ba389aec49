"""The sources of documents, and how they are cut into units of work.

A *unit* is a piece of a source that one process reads from end to end. It is some text files or a
range of bytes of a JSONL file. Of a Parquet file it is row groups, of a Hugging Face dataset rows.
Units are cut by the sources' sizes alone. So the units and the order of the documents do not depend
on the number of processes.

Every document is put into its normal form: UTF-8 without a byte order mark, lines that end in
a line feed. Documents of nothing but white space are yielded as they are; the reader counts
and skips them.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_128

from holdfast.core.json_parsing import parse_json
from holdfast.data import columnar_sources
from holdfast.errors import DataError

if TYPE_CHECKING:  # a preparing process needs no pydantic
    from holdfast.config.data import SourceConfig

UNIT_BYTES = 1 << 19
MAX_UNIT_BYTES = 64 << 20
TARGET_UNITS = 2048  # units grow with the source until they reach MAX_UNIT_BYTES

# Folders of the standard library that are tests, or programs rather than library.
STDLIB_SKIP = frozenset(
    {
        "site-packages",
        "dist-packages",
        "__pycache__",
        "test",
        "tests",
        "idle_test",
        "idlelib",
        "lib2to3",
        "ensurepip",
        "turtledemo",
        "lib-dynload",
    }
)


@dataclass(frozen=True)
class Unit:
    """Piece `index` of the full preparation; `parts` are (path, start, stop) of its kind.

    start and stop are bytes for text and JSONL, row groups for Parquet, rows for Hugging Face.
    """

    index: int
    source: int
    kind: str
    parts: tuple[tuple[str, int, int], ...]
    field: str = "text"
    split: str = "train"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> Unit:
        parts = tuple((str(p), int(a), int(b)) for p, a, b in value["parts"])
        return Unit(**{**value, "parts": parts})


@dataclass(frozen=True)
class SourcePlan:
    """One source, found and cut. `stamp` changes when a file of it does."""

    name: str
    units: tuple[Unit, ...]
    files: int
    bytes: int
    stamp: str


def source_names(sources: tuple[SourceConfig, ...]) -> list[str]:
    """Names in the mixture. Raises DataError when two are alike."""
    names = [source.name or source.kind for source in sources]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise DataError(
                f"two sources are named {name!r}",
                where=f"data.sources[{i}].name",
                remedy="give each its own name",
            )
    return names


def plan_source(config: SourceConfig, index: int, first_unit: int) -> SourcePlan:
    """Find a source's files and cut them. Raises DataError when there is nothing to read."""
    name = config.name or config.kind
    where = f"data.sources[{index}]"
    if config.kind == "huggingface":
        files = [(config.place or "", 0)]
        ranges = columnar_sources.huggingface_ranges(files[0][0], config.split, where)
    else:
        files = _files(config, where)
        size = sum(s for _, s in files)
        unit = min(MAX_UNIT_BYTES, max(UNIT_BYTES, size // TARGET_UNITS))
        if config.kind == "jsonl":
            ranges = [
                [(path, at, min(at + unit, size))]
                for path, size in files
                for at in range(0, size, unit)
            ]
        elif config.kind == "parquet":
            ranges = columnar_sources.parquet_ranges(
                [path for path, _ in files], config.field, unit
            )
        else:
            ranges = _group_files(files, unit)
    units = tuple(
        Unit(first_unit + i, index, config.kind, tuple(parts), config.field, config.split)
        for i, parts in enumerate(ranges)
    )
    stamp = xxh3_128()
    for path, size in files:
        changed = os.stat(path).st_mtime_ns if os.path.exists(path) else 0
        stamp.update(f"{path}\0{size}\0{changed}\n".encode(errors="surrogateescape"))
    return SourcePlan(name, units, len(files), sum(s for _, s in files), stamp.hexdigest())


def count_files(config: SourceConfig, index: int) -> tuple[int, int] | None:
    """(files, bytes) of a source as it is now; None where it has no files, or not any more."""
    if config.kind == "huggingface":
        return None
    try:
        files = _files(config, f"data.sources[{index}]")
    except (DataError, OSError):
        return None
    return len(files), sum(size for _, size in files)


def read_unit(unit: Unit, limit: int, seen: xxh3_128) -> Iterator[str]:
    """The documents of a unit in order, in normal form; `seen` takes in every byte read.

    No document or line longer than `limit` bytes is ever held. Raises DataError for what is not
    UTF-8 text, for what is too long, and for a missing field; each names file and place.
    """
    for path, start, stop in unit.parts:
        if unit.kind == "jsonl":
            yield from _jsonl_documents(path, start, stop, unit.field, limit, seen)
        elif unit.kind in ("parquet", "huggingface"):
            yield from columnar_sources.read_rows(
                unit.kind, path, start, stop, unit.field, unit.split, limit, seen
            )
        else:
            yield _read_text(path, limit, seen)


def _files(config: SourceConfig, where: str) -> list[tuple[str, int]]:
    """(path, size) of a source's files, sorted by path."""
    if config.kind == "python-stdlib":
        root = sysconfig.get_path("stdlib")
        found = [
            path
            for path in _walk(root, STDLIB_SKIP)
            if path.endswith(".py") and not os.path.basename(path).startswith("_sysconfigdata")
        ]
        path = root
    else:
        path = config.place or ""  # the run file demands one of every other kind
        expanded = os.path.expanduser(path)
        if os.path.isfile(expanded):
            found = [expanded]
        elif os.path.isdir(expanded):
            found = list(_walk(expanded))
        elif has_magic(expanded):
            found = [p for p in glob(expanded, recursive=True) if os.path.isfile(p)]
        else:
            raise DataError(
                f"{path} does not exist",
                where=f"{where}.path",
                remedy="name a file, a folder or a glob",
            )
    if not found:
        raise DataError(
            f"{path} holds no file",
            where=f"{where}.path",
            remedy="name a file, a folder or a glob that matches one",
        )
    return [(p, os.path.getsize(p)) for p in sorted(found)]


def _walk(root: str, skip: frozenset[str] = frozenset()) -> Iterator[str]:
    """Regular files below a folder; hidden ones are left out."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in skip and not f.startswith("."))
        for file in files:
            path = os.path.join(folder, file)
            if not file.startswith(".") and os.path.isfile(path):
                yield path


def _group_files(files: list[tuple[str, int]], unit: int) -> list[list[tuple[str, int, int]]]:
    """Consecutive files until they fill a unit."""
    groups: list[list[tuple[str, int, int]]] = []
    held = unit
    for path, size in files:
        if held >= unit:
            groups.append([])
            held = 0
        groups[-1].append((path, 0, size))
        held += size
    return groups


def _read_text(path: str, limit: int, seen: xxh3_128) -> str:
    with open(path, "rb") as file:
        raw = file.read(limit + 1)
    if len(raw) > limit:
        raise too_long_error(path, raw.count(b"\n") + 1, limit, "the file passes")
    seen.update(raw)
    return normal_form(raw, path, 0)


def normal_form(raw: bytes, path: str, at: int) -> str:
    """Decode and normalise bytes that stand at offset `at` of a file."""
    zero = raw.find(b"\0")
    if zero >= 0:
        raise DataError(
            f"a zero byte at offset {at + zero}: this is a binary file, not text",
            where=path,
            remedy="leave it out of the source",
        )
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"byte 0x{raw[error.start]:02x} at offset {at + error.start} is not UTF-8",
            where=path,
            remedy="convert the file to UTF-8, or leave it out of the source",
        ) from None
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def too_long_error(path: str, line: int, limit: int, what: str) -> DataError:
    return DataError(
        f"{what} data.max_document_bytes ({limit:,})",
        where=f"{path}:{line}",
        remedy="raise data.max_document_bytes, or split the document",
    )


def _line_number(path: str, offset: int) -> int:
    """1-based number of the line that begins at `offset`; only errors pay for counting."""
    lines = 1
    with open(path, "rb") as file:
        while offset > 0 and (piece := file.read(min(offset, 1 << 20))):
            lines += piece.count(b"\n")
            offset -= len(piece)
    return lines


def _jsonl_documents(
    path: str, start: int, stop: int, field: str, limit: int, seen: xxh3_128
) -> Iterator[str]:
    """Documents of the lines that begin in [start, stop) of a file."""
    with open(path, "rb") as file:
        at = start
        if start:
            file.seek(start - 1)
            while (piece := file.readline(1 << 20)) and not piece.endswith(b"\n"):
                pass  # the rest of a line that an earlier unit owns, never held in full
            at = file.tell()
        while at < stop:
            line = file.readline(limit + 2)  # with its line ending
            if not line:
                return
            if len(line.removesuffix(b"\n").removesuffix(b"\r")) > limit:
                raise too_long_error(path, _line_number(path, at), limit, "the line is longer than")
            seen.update(line)
            yield _json_field(line, path, at, field)
            at += len(line)


def _json_field(line: bytes, path: str, at: int, field: str) -> str:
    text = normal_form(line, path, at)
    if not text.strip():
        return ""
    try:
        value = parse_json(text)
    except ValueError as error:
        reason = getattr(error, "msg", str(error))
        raise DataError(
            f"not JSON ({reason})",
            where=f"{path}:{_line_number(path, at)}",
            remedy="mend the line, or use kind: text",
        ) from None
    if not isinstance(value, dict) or not isinstance(value.get(field), str):
        has = f"it has {sorted(value)}" if isinstance(value, dict) else "it is not an object"
        raise DataError(
            f"the line has no text in the field {field!r} ({has})",
            where=f"{path}:{_line_number(path, at)}",
            remedy="set field in data.sources to the one that holds the text",
        )
    document: str = value[field]
    return document.replace("\r\n", "\n")


def encode_document(text: str, where: str) -> bytes:
    """UTF-8 of a document. JSON can spell half a surrogate pair, which is no character."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise DataError(
            "a document holds half of a surrogate pair, which is not text",
            where=where,
            remedy="mend or remove it",
        ) from None


def unit_label(unit: Unit) -> str:
    first = Path(unit.parts[0][0]).name
    return first if len(unit.parts) == 1 else f"{first} and {len(unit.parts) - 1} more"

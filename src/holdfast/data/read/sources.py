"""The sources of documents, and how they are cut into units of work.

A *unit* is a piece of a source that one process reads from end to end. It is some text files or a
range of bytes of a JSONL file. Of a Parquet file it is row groups, of a Hugging Face dataset rows.
A compressed file, an array of JSON, a CSV file and an Arrow file are one unit each. Units are cut
by the sources' sizes alone. So the units and the order of the documents do not depend on the number
of processes.

Every document is put into its normal form: UTF-8 without a byte order mark, lines that end in
a line feed. Documents of nothing but white space are yielded as they are; the reader counts
and skips them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from xxhash import xxh3_128

from holdfast.core.json_parsing import JsonMessage
from holdfast.data.read import (
    columnar_sources,
    media_sources,
    record_sources,
    text_sources,
    token_sources,
)
from holdfast.data.read.chat_borders import ChatNotes
from holdfast.data.read.chat_documents import ChatFormat, ChatReader
from holdfast.data.read.containers import empty_error, is_compressed, read_head
from holdfast.data.read.features import FeatureFormat, MediaText
from holdfast.data.read.preference_rows import FORMS, field_of
from holdfast.data.read.source_files import TOKEN_KIND, FoundFiles, find_files, unreadable_error
from holdfast.errors import DataError

if TYPE_CHECKING:  # a preparing process needs no pydantic
    from holdfast.config.sections.data import SourceConfig

UNIT_BYTES = 1 << 19
MAX_UNIT_BYTES = 64 << 20
TARGET_UNITS = 2048  # units grow with the source until they reach MAX_UNIT_BYTES

Ranges = list[list[tuple[str, int, int]]]


@dataclass(frozen=True)
class Unit(JsonMessage):
    """Piece `index` of the full preparation; `parts` are (path, start, stop) of its kind.

    kind: text, files, jsonl, csv, parquet, arrow, huggingface, megatron or one of `record_sources`:
    how the parts are read. start and stop are bytes for text and JSONL, row groups for Parquet,
    rows for Hugging Face, documents for Megatron. A stop of 0 is the end of the file. name: of the
    source. rows, chat: of chat data, its form and how it becomes text. tokenizer: path of the one
    whose tokens a token shard has. media, features: of images and recordings, the column or ending,
    and how they become numbers.
    """

    index: int
    source: int
    kind: str
    parts: tuple[tuple[str, int, int], ...]
    field: str = "text"
    split: str = "train"
    name: str = ""
    rows: str = "text"
    chat: ChatFormat | None = None
    skips_bad_rows: bool = False
    tokenizer: str = ""
    media: str = ""
    features: FeatureFormat | None = None

    @property
    def is_chat(self) -> bool:
        return self.chat is not None


@dataclass(frozen=True)
class SourcePlan:
    """One source, found and cut. `stamp` changes when a file of it does. `unread`: a line about
    what is not read. `refused`: files that cannot be."""

    name: str
    units: tuple[Unit, ...]
    files: int
    bytes: int
    stamp: str
    unread: str = ""
    refused: tuple[DataError, ...] = ()


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


def plan_source(
    config: SourceConfig,
    index: int,
    first_unit: int,
    chat: ChatFormat | None = None,
    tokenizer: str | None = None,
    features: FeatureFormat | None = None,
) -> SourcePlan:
    """Find a source's files and cut them. `chat`: how a source of chat data becomes text.
    `tokenizer`: path of the one that is given. `features`: of sources of images and recordings.
    Raises DataError when there is nothing to read."""
    chat = None if config.rows == "text" else chat
    name = config.name or config.kind
    found = FoundFiles()
    refused: list[DataError] = []
    try:
        kinds = _cut(config, f"data.sources[{index}]", found, refused, features)
    except DataError as error:
        raise named_error(name, error) from None
    units = tuple(
        Unit(
            first_unit + i,
            index,
            kind,
            tuple(parts),
            config.field,
            config.split,
            name,
            config.rows,
            chat,
            config.bad_rows == "skip",
            tokenizer or "" if config.kind == TOKEN_KIND else "",
            config.media,
            features,
        )
        for i, (kind, parts) in enumerate(kinds)
    )
    stamp = xxh3_128()
    for path, size in found.files:
        changed = os.stat(path).st_mtime_ns if os.path.exists(path) else 0
        stamp.update(f"{path}\0{size}\0{changed}\n".encode(errors="surrogateescape"))
    total = sum(size for _, size in found.files)
    problems = tuple(named_error(name, error) for error in [*found.refused, *refused])
    unread = found.describe_unread()
    return SourcePlan(name, units, len(found.files), total, stamp.hexdigest(), unread, problems)


def _cut(
    config: SourceConfig,
    where: str,
    found: FoundFiles,
    refused: list[DataError],
    features: FeatureFormat | None,
) -> list[tuple[str, list[tuple[str, int, int]]]]:
    """(kind, parts) of each unit. The files go into `found`, bad ones into `refused`."""
    columns = _columns(config, features)
    if config.kind == "huggingface":
        path = os.path.expanduser(config.place or "")
        if not os.path.isdir(path):
            if features is not None:
                raise DataError(
                    f"{config.path} is no folder, and a dataset with images or recordings is read "
                    "from one",
                    where=f"{where}.path",
                    remedy="download it, and name its folder",
                )
            found.files.append((config.path or "", 0))
            of_split = columnar_sources.huggingface_ranges(config.path or "", config.split, where)
            return [("huggingface", parts) for parts in of_split]
        units: list[tuple[str, list[tuple[str, int, int]]]] = []
        for file in columnar_sources.folder_files(path, config.split, where, found):
            found.files.append((file, os.path.getsize(file)))
        size = _unit_bytes(found)
        for file, _ in found.files:
            if file.endswith(".parquet"):
                cut = columnar_sources.parquet_ranges([file], columns, size, refused)
                units += [("parquet", parts) for parts in cut]
            else:
                cut = columnar_sources.arrow_ranges([file], columns, refused)
                units += [("arrow", parts) for parts in cut]
        return units
    every = find_files(config, where)
    found.files, found.unread, found.refused = every.files, every.unread, every.refused
    unit = _unit_bytes(found)
    if config.kind == "jsonl":
        ranges: Ranges = []
        for path, size in found.files:
            try:
                # True for a JSON file that cannot be cut: it is compressed, or one array.
                head = read_head(path)
                if not head:
                    raise empty_error(path, "JSON")
                packed = is_compressed(head) or text_sources.begins_array(path)
            except DataError as error:
                refused.append(error)
                continue
            if packed:
                ranges.append([(path, 0, 0)])
            else:
                starts = range(0, size, unit)
                ranges += [[(path, at, min(at + unit, size))] for at in starts]
        return [("jsonl", parts) for parts in ranges]
    if config.kind == "arrow":
        paths = [path for path, _ in found.files]
        cut = columnar_sources.arrow_ranges(paths, columns, refused)
        return [("arrow", parts) for parts in cut]
    if config.kind in record_sources.READERS:
        return [(config.kind, [(path, 0, 0)]) for path in _record_files(config, found)]
    if config.kind == TOKEN_KIND:
        paths = [path for path, _ in found.files]
        return [(config.kind, p) for p in token_sources.token_ranges(paths, unit, refused)]
    if config.kind == "csv":
        return [("csv", [(path, 0, 0)]) for path, _ in found.files]
    if config.kind == "parquet":
        paths = [path for path, _ in found.files]
        cut = columnar_sources.parquet_ranges(paths, columns, unit, refused)
        return [("parquet", parts) for parts in cut]
    if features is not None and config.kind == "files":
        media_sources.chosen_files(found, config.field, features)
        if not found.files:
            raise DataError(
                f"{config.path} holds no {features.column} ({found.describe_unread()})",
                where=f"{where}.path",
                remedy=f"name files that end with one of {', '.join(features.endings)}",
            )
        return [("files", parts) for parts in _group_files(found.files, unit)]
    return [("text", parts) for parts in _group_files(found.files, unit)]


def _record_files(config: SourceConfig, found: FoundFiles) -> Sequence[str]:
    """The files that are read one by one; of Lance the folder."""
    if config.kind == "lance":
        return [os.path.expanduser(config.place or "")]
    paths = [path for path, _ in found.files]
    return record_sources.mds_shards(config.place or "", paths) if config.kind == "mds" else paths


def _columns(config: SourceConfig, features: FeatureFormat | None) -> Sequence[str]:
    """The columns that a table must have."""
    if features is not None:
        return (config.media or features.column, *([config.field] if config.field else []))
    if config.rows == "text":
        return (config.field,)
    return FORMS[config.rows].columns or (field_of(config.rows, config.field),)


def _unit_bytes(found: FoundFiles) -> int:
    total = sum(size for _, size in found.files)
    return min(MAX_UNIT_BYTES, max(UNIT_BYTES, total // TARGET_UNITS))


def source_files(config: SourceConfig, index: int) -> list[tuple[str, int]]:
    """(path, size) of a source's files as they are now; empty if it has none, or not any more."""
    found = FoundFiles()
    try:
        if config.kind != "huggingface":
            return find_files(config, f"data.sources[{index}]").files
        path = os.path.expanduser(config.place or "")
        files = columnar_sources.folder_files(path, config.split, "", found)
        return [(file, os.path.getsize(file)) for file in files]
    except (DataError, OSError):
        return []


def named_error(name: str, error: DataError, column: str = "") -> DataError:
    """The same refusal with the source, and the column, in its place."""
    where = f"source {name!r}" + (f": {error.where}" if error.where else "")
    if column:
        where += f", column {column!r}"
    return DataError(error.message, where=where, remedy=error.remedy)


def read_unit(
    unit: Unit,
    limit: int,
    seen: xxh3_128,
    refused: list[DataError] | None = None,
    notes: ChatNotes | None = None,
) -> Iterator[str]:
    """The documents of a unit in order, in normal form; `seen` takes in every byte read.

    No document or line longer than `limit` bytes is ever held. Raises DataError for what is not
    UTF-8 text, for what is too long, and for a missing field; each names source, file, place and
    column. With `refused`, such an error is appended to it, and the next part is read. A
    document of chat data is spelt as by `RowDocuments.encode`; `notes` counts what is not trained
    on.
    """
    is_without = unit.kind in ("text", TOKEN_KIND) or unit.is_chat or unit.features is not None
    column = "" if is_without else unit.field
    take = text_sources.text_in(unit.field)
    if unit.chat is not None:
        take = ChatReader(unit.rows, unit.field, unit.chat, notes or ChatNotes()).read
    if unit.skips_bad_rows and refused is None:
        refused = []  # the scan has counted them

    def leave(error: DataError) -> None:
        """A bad row. Raises its error, if bad rows are not left out."""
        if not unit.skips_bad_rows:
            raise error
        assert refused is not None
        refused.append(named_error(unit.name or unit.kind, error, column))

    def leave_undecoded(error: DataError) -> None:
        """A document that cannot be decoded. Raises its error, unless there is a list for it."""
        if refused is None:
            raise named_error(unit.name or unit.kind, error)
        refused.append(named_error(unit.name or unit.kind, error))

    for path, start, stop in unit.parts:
        at = (unit.kind, path, start, stop)
        try:
            if unit.features is not None:
                part = (path, start, stop)
                found = media_sources.read_media(
                    unit.kind, part, unit.media, unit.field, unit.features, limit
                )
                for one in found:
                    try:
                        if isinstance(one, DataError):
                            raise one
                        place, content, said = one
                        text = media_sources.text_of(said, place)
                    except DataError as error:
                        leave(error)
                    else:
                        seen.update(content)
                        seen.update(b"%s\0" % text.encode())
                        yield MediaText(text, content, place, unit.features, leave_undecoded)
            elif unit.kind == "jsonl":
                yield from text_sources.json_documents(path, start, stop, take, limit, seen, leave)
            elif unit.kind == "csv":
                yield from text_sources.csv_documents(path, unit.field, limit, seen)
            elif unit.kind == "text":
                yield text_sources.text_document(path, limit, seen)
            elif unit.kind in record_sources.READERS:
                yield from _records(unit, path, limit, seen, leave)
            elif unit.kind == TOKEN_KIND:
                for raw, document in token_sources.read_documents(*at[1:], unit.tokenizer, limit):
                    seen.update(raw)
                    if isinstance(document, DataError):
                        leave(document)
                    else:
                        yield document
            elif unit.is_chat:
                yield from columnar_sources.read_records(*at, unit.split, take, limit, seen)
            else:
                yield from columnar_sources.read_rows(
                    *at, unit.field, unit.split, limit, seen, leave
                )
        except (DataError, OSError) as error:
            if isinstance(error, OSError):
                error = unreadable_error(path, error)
            problem = named_error(unit.name or unit.kind, error, column)
            if refused is None:
                raise problem from None
            refused.append(problem)


def _records(
    unit: Unit, path: str, limit: int, seen: xxh3_128, leave: text_sources.LeaveRow
) -> Iterator[str]:
    for place, found in record_sources.read_documents(unit.kind, path, unit.field, limit):
        try:
            if isinstance(found, DataError):
                raise found
            seen.update(found + b"\n")
            text = text_sources.normal_form(found, place, 0)
        except DataError as error:
            leave(error)
        else:
            yield text


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


def unit_label(unit: Unit) -> str:
    first = Path(unit.parts[0][0]).name
    return first if len(unit.parts) == 1 else f"{first} and {len(unit.parts) - 1} more"

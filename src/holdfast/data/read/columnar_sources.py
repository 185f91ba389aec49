"""Sources with columns, each through an extra: Parquet, Arrow and Hugging Face datasets."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from xxhash import xxh3_128

from holdfast.config.huggingface.folder import is_pointer
from holdfast.data.read.containers import empty_error, pointer_error, read_head
from holdfast.data.read.source_files import FoundFiles, walk
from holdfast.data.read.text_sources import (
    LeaveRow,
    TakeDocument,
    clean_text,
    nearest_column,
    too_long_error,
)
from holdfast.errors import DataError

BATCH_ROWS = 256
BATCH_BYTES = 4 << 20
"""Rows are read in batches of about this size, so that long documents are not held together."""
HUGGINGFACE_UNIT_ROWS = 4096
COLUMNAR = (".arrow", ".parquet")

Ranges = list[list[tuple[str, int, int]]]


# --- Parquet --------------------------------------------------------------------------------
def parquet_ranges(
    paths: list[str],
    columns: Sequence[str],
    unit_bytes: int,
    refused: list[DataError] | None = None,
) -> Ranges:
    """Row groups of each file, gathered into units of about `unit_bytes`. Raises DataError, or
    appends it to `refused`, for a file that is no Parquet file or lacks one of the columns."""
    ranges: Ranges = []
    for path in paths:
        try:
            with _open_parquet(path) as file:
                _require_columns(file.schema_arrow, columns, path)
                groups = file.metadata
                sizes = [groups.row_group(g).total_byte_size for g in range(groups.num_row_groups)]
        except DataError as error:
            if refused is None:
                raise
            refused.append(error)
            continue
        first, held = 0, 0
        for group, size in enumerate(sizes):
            held += size
            if held >= unit_bytes or group + 1 == len(sizes):
                ranges.append([(path, first, group + 1)])
                first, held = group + 1, 0
    return ranges


def _open_parquet(path: str) -> Any:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError(
            "reading Parquet needs pyarrow", where=path, remedy="pip install 'holdfast[data]'"
        ) from None
    _refuse_head(path, "Parquet")
    try:
        return ParquetFile(path, page_checksum_verification=True)
    except (ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"not a Parquet file ({_reason(error)})",
            where=path,
            remedy="name Parquet files only, and fetch a damaged one again",
        ) from None


def _refuse_head(path: str, what: str) -> None:
    head = read_head(path)
    if not head:
        raise empty_error(path, f"{'an' if what[0] in 'AEIOU' else 'a'} {what} file")
    if is_pointer(head):
        raise pointer_error(path)


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")[:200]


def _require_columns(schema: Any, columns: Sequence[str], path: str) -> None:
    names = list(schema.names)
    texts = [f.name for f in schema if "string" in str(f.type)]
    for column in columns:
        if column not in names:
            raise DataError(
                f"there is no column {column!r}, only {names}",
                where=path,
                remedy=nearest_column(column, texts or names),
            )


def _values(batch: Any, column: str | None) -> Any:
    """The cells of a column, or all rows of a batch as objects."""
    if column is None:
        return batch.to_pylist()
    return batch.column(batch.schema.names.index(column))


@contextmanager
def _damage(path: str, what: str) -> Iterator[None]:
    """Turn what pyarrow says of damaged bytes into one sentence."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError, ValueError, MemoryError) as error:
        raise DataError(
            f"the file is damaged ({_reason(error)})",
            where=f"{path}, {what}",
            remedy="fetch it again, or leave it out of the source",
        ) from None


def _parquet_rows(
    path: str, start: int, stop: int, column: str | None
) -> Iterator[tuple[str, Any]]:
    with _open_parquet(path) as file:
        groups = file.metadata
        first = sum(groups.row_group(g).num_rows for g in range(start))
        for group in range(start, stop):
            about = groups.row_group(group)
            rows = _batch_rows(about.total_byte_size, about.num_rows)
            what = f"row group {group}"
            batches = file.iter_batches(rows, row_groups=[group], columns=column and [column])
            row = 0
            while True:
                with _damage(path, f"{what}, after row {first + row}"):
                    batch = next(batches, None)
                if batch is None:
                    break
                for value in _values(batch, column):
                    yield f"{path}, {what}, row {first + row}", value
                    row += 1
            first += row


def _batch_rows(size: int, rows: int) -> int:
    return max(1, min(BATCH_ROWS, BATCH_BYTES * max(rows, 1) // max(size, 1)))


# --- Arrow ----------------------------------------------------------------------------------
def arrow_ranges(paths: list[str], columns: Sequence[str], refused: list[DataError]) -> Ranges:
    """Each file, after a look at its columns."""
    ranges: Ranges = []
    for path in paths:
        try:
            with _open_arrow(path) as reader:
                _require_columns(reader.schema, columns, path)
        except DataError as error:
            refused.append(error)
        else:
            ranges.append([(path, 0, 0)])
    return ranges


@contextmanager
def _open_arrow(path: str) -> Iterator[Any]:
    """A stream or a file of record batches, as `datasets` writes them."""
    try:
        import pyarrow
        from pyarrow import ipc
    except ImportError:
        raise DataError(
            "reading Arrow needs pyarrow", where=path, remedy="pip install 'holdfast[data]'"
        ) from None
    _refuse_head(path, "Arrow")
    with pyarrow.memory_map(path) as source:
        with _damage(path, "head"):
            try:
                reader = ipc.open_file(source)
            except pyarrow.ArrowInvalid:
                source.seek(0)
                reader = ipc.open_stream(source)
        yield reader


def _arrow_rows(path: str, column: str | None) -> Iterator[tuple[str, Any]]:
    with _open_arrow(path) as reader:
        batches = getattr(reader, "num_record_batches", None)
        row = number = 0
        while batches is None or number < batches:
            with _damage(path, f"record batch {number}, after row {row}"):
                batch = _next_batch(reader, None if batches is None else number)
                if batch is None:
                    return
                _validate(batch)
            for value in _values(batch, column):
                yield f"{path}, row {row}", value
                row += 1
            number += 1


def _validate(batch: Any) -> None:
    """Check offsets, which decide what memory is read. A text that is not UTF-8 is found later,
    with its row."""
    from pyarrow import ArrowInvalid

    try:
        batch.validate(full=True)
    except ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise


def _next_batch(reader: Any, number: int | None) -> Any:
    if number is not None:
        return reader.get_batch(number)
    try:
        return reader.read_next_batch()
    except StopIteration:
        return None


# --- Hugging Face ---------------------------------------------------------------------------
def folder_files(folder: str, split: str, where: str, found: FoundFiles) -> list[str]:
    """The Arrow or Parquet files of a split, in a folder that `datasets` saved or the hub has."""
    every = sorted(p for p in walk(folder, found) if p.endswith(COLUMNAR))
    here = [p for p in every if os.path.relpath(p, folder).startswith(f"{split}/")]
    if here:
        return here
    named = [p for p in every if split in _words(os.path.relpath(p, folder))]
    if named:
        return named
    others = {"train", "test", "validation", "dev", "valid"} - {split}
    plain = [p for p in every if not others & set(_words(os.path.relpath(p, folder)))]
    if plain and split == "train":
        return plain
    splits = sorted({w for p in every for w in _words(os.path.relpath(p, folder)) if w in others})
    if every:
        raise DataError(
            f"{folder} has no split {split!r}" + (f", only {splits}" if splits else ""),
            where=where,
            remedy=f"set split: {splits[0]}" if splits else "name another folder",
        )
    raise DataError(
        f"{folder} holds no .arrow and no .parquet file",
        where=where,
        remedy="name the folder of a dataset, or use kind: jsonl, csv or text",
    )


def _words(path: str) -> list[str]:
    return re.split(r"[-_./\\]", path)


def huggingface_ranges(path: str, split: str, where: str) -> Ranges:
    """Ranges of rows of a dataset's split."""
    rows = len(_open_huggingface(path, split, where))
    step = HUGGINGFACE_UNIT_ROWS
    return [[(path, at, min(at + step, rows))] for at in range(0, rows, step)]


def _open_huggingface(path: str, split: str, where: str) -> Any:
    """A dataset by name ("name" or "name:subset"), from the cache where it is there."""
    try:
        from datasets import load_dataset
    except ImportError:  # not there, or a folder of that name stands where Python looks
        raise DataError(
            "a Hugging Face source needs the datasets package",
            where=where,
            remedy="pip install 'holdfast[hf]', or name a folder of its files",
        ) from None
    name, _, subset = path.partition(":")
    try:
        return load_dataset(name, subset or None, split=split)
    except (ValueError, OSError) as error:
        raise DataError(
            f"{path}, split {split}, cannot be loaded: {error}",
            where=where,
            remedy="name a dataset as name or name:subset",
        ) from None


def _huggingface_rows(
    path: str, start: int, stop: int, column: str | None, split: str
) -> Iterator[tuple[str, Any]]:
    dataset = _open_huggingface(path, split, path)
    if column is None:
        yield from ((f"{path}, row {i}", dataset[i]) for i in range(start, stop))
        return
    if column not in dataset.column_names:
        raise DataError(
            f"there is no column {column!r}, only {dataset.column_names}",
            where=path,
            remedy=nearest_column(column, dataset.column_names),
        )
    for at in range(start, stop, BATCH_ROWS):
        values = dataset[at : min(at + BATCH_ROWS, stop)][column]
        yield from ((f"{path}, row {at + i}", value) for i, value in enumerate(values))


# --- rows -----------------------------------------------------------------------------------
def read_rows(
    kind: str,
    path: str,
    start: int,
    stop: int,
    column: str,
    split: str,
    limit: int,
    seen: xxh3_128,
    leave: LeaveRow,
) -> Iterator[str]:
    """Documents of row groups (Parquet), of a file (Arrow) or of rows (Hugging Face)."""
    for place, value in _rows(kind, path, start, stop, column, split):
        try:
            text = _document_of(value, column, place, limit, seen)
        except DataError as error:
            leave(error)
        else:
            yield text


def _document_of(value: Any, column: str, place: str, limit: int, seen: xxh3_128) -> str:
    text = _as_text(value, column, place)
    if text is None:
        return ""
    raw = text.encode(errors="surrogatepass")
    if len(raw) > limit:
        raise too_long_error(place, limit, "the document is longer than")
    seen.update(raw + b"\n")
    return clean_text(text, place)


def read_records(
    kind: str,
    path: str,
    start: int,
    stop: int,
    split: str,
    take: TakeDocument,
    limit: int,
    seen: xxh3_128,
) -> Iterator[str]:
    """As `read_rows`, but a document is what `take` makes of all columns of a row."""
    for place, value in _rows(kind, path, start, stop, None, split):
        raw = json.dumps(value, default=str).encode()
        if len(raw) > limit:
            raise too_long_error(place, limit, "the row is longer than")
        seen.update(raw + b"\n")
        yield take(_without_nulls(value), place)


def read_cells(
    kind: str, path: str, start: int, stop: int, columns: Sequence[str]
) -> Iterator[tuple[str, list[Any]]]:
    """(place, cells of these columns) of row groups (Parquet) or of a file (Arrow)."""
    for cells in zip(*(_rows(kind, path, start, stop, c, "") for c in columns), strict=True):
        yield cells[0][0], [cell for _, cell in cells]


def _without_nulls(value: Any) -> Any:
    """A cell without the keys that a table fills in because other rows have them."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _rows(
    kind: str, path: str, start: int, stop: int, column: str | None, split: str
) -> Iterator[tuple[str, Any]]:
    """(place, cell), or without a column (place, row as an object)."""
    if kind == "parquet":
        return _parquet_rows(path, start, stop, column)
    if kind == "arrow":
        return _arrow_rows(path, column)
    return _huggingface_rows(path, start, stop, column, split)


def plain_cell(value: Any, place: str) -> Any:
    """A cell as a value of Python. Raises DataError for a text that is not UTF-8."""
    try:
        return value.as_py() if hasattr(value, "as_py") else value
    except UnicodeDecodeError as error:
        raise DataError(
            f"byte 0x{error.object[error.start]:02x} at offset {error.start} of the text is "
            "not UTF-8",
            where=place,
            remedy="convert the column to UTF-8, or leave the row out",
        ) from None


def _as_text(value: Any, column: str, place: str) -> str | None:
    """A cell's text; None for an empty cell."""
    found = plain_cell(value, place)
    if found is None or isinstance(found, str):
        return found
    raise DataError(
        f"the column {column!r} holds {type(found).__name__}, not text",
        where=place,
        remedy="set field to a column of text",
    )

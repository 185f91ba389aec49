"""Sources with columns: Parquet files and Hugging Face datasets. Both are extras."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from xxhash import xxh3_128

from holdfast.errors import DataError

BATCH_ROWS = 256
HUGGINGFACE_UNIT_ROWS = 4096


def parquet_ranges(
    paths: list[str], column: str, unit_bytes: int
) -> list[list[tuple[str, int, int]]]:
    """Row groups of each file, gathered into units of about `unit_bytes`."""
    ranges: list[list[tuple[str, int, int]]] = []
    for path in paths:
        file = _open_parquet(path)
        names = file.schema_arrow.names
        if column not in names:
            raise DataError(
                f"there is no column {column!r}, only {names}",
                where=path,
                remedy="set field in data.sources to the one that holds the text",
            )
        first, held = 0, 0
        for group in range(file.metadata.num_row_groups):
            held += file.metadata.row_group(group).total_byte_size
            if held >= unit_bytes or group + 1 == file.metadata.num_row_groups:
                ranges.append([(path, first, group + 1)])
                first, held = group + 1, 0
    return ranges


def huggingface_ranges(path: str, split: str, where: str) -> list[list[tuple[str, int, int]]]:
    """Ranges of rows of a dataset's split."""
    rows = len(_open_huggingface(path, split, where))
    step = HUGGINGFACE_UNIT_ROWS
    return [[(path, at, min(at + step, rows))] for at in range(0, rows, step)]


def read_rows(
    kind: str, path: str, start: int, stop: int, column: str, split: str, limit: int, seen: xxh3_128
) -> Iterator[str]:
    """Documents of row groups (Parquet) or rows (Hugging Face) [start, stop)."""
    values = (
        _parquet_rows(path, start, stop, column)
        if kind == "parquet"
        else _huggingface_rows(path, start, stop, column, split)
    )
    for place, value in values:
        if value is None:
            yield ""
            continue
        if not isinstance(value, str):
            raise DataError(
                f"the column {column!r} holds {type(value).__name__}, not text",
                where=place,
                remedy="set field to a column of text",
            )
        # Half a surrogate pair cannot come out of Arrow, so encoding cannot fail.
        raw = value.encode()
        if len(raw) > limit:
            raise DataError(
                f"the document is longer than data.max_document_bytes ({limit:,})",
                where=place,
                remedy="raise data.max_document_bytes, or split the document",
            )
        seen.update(raw + b"\n")
        yield value.removeprefix("\ufeff").replace("\r\n", "\n")


def _open_parquet(path: str) -> Any:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError(
            "reading Parquet needs pyarrow", where=path, remedy="pip install 'holdfast[data]'"
        ) from None
    try:
        return ParquetFile(path)
    except ArrowInvalid as error:
        raise DataError(
            f"not a Parquet file ({str(error).splitlines()[0]})",
            where=path,
            remedy="name Parquet files only",
        ) from None


def _parquet_rows(path: str, start: int, stop: int, column: str) -> Iterator[tuple[str, Any]]:
    groups = list(range(start, stop))
    row = 0
    with _open_parquet(path) as file:
        for batch in file.iter_batches(BATCH_ROWS, row_groups=groups, columns=[column]):
            for value in batch.column(0).to_pylist():
                yield f"{path}: row group {start}, row {row} from there", value
                row += 1


def _open_huggingface(path: str, split: str, where: str) -> Any:
    """A dataset by name ("name" or "name:subset"), from the cache where it is there."""
    try:
        from datasets import load_dataset
    except ImportError:  # not there, or a folder of that name stands where Python looks
        raise DataError(
            "a Hugging Face source needs the datasets package",
            where=where,
            remedy="pip install 'holdfast[hf]'",
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
    path: str, start: int, stop: int, column: str, split: str
) -> Iterator[tuple[str, Any]]:
    dataset = _open_huggingface(path, split, path)
    if column not in dataset.column_names:
        raise DataError(
            f"there is no column {column!r}, only {dataset.column_names}",
            where=path,
            remedy="set field in data.sources to the one that holds the text",
        )
    for at in range(start, stop, BATCH_ROWS):
        values = dataset[at : min(at + BATCH_ROWS, stop)][column]
        yield from ((f"{path}: row {at + i}", value) for i, value in enumerate(values))

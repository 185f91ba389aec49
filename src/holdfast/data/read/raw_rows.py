"""The rows of a source as JSON, before their form is known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from xxhash import xxh3_128

from holdfast.config.sections.data import SourceConfig
from holdfast.data.read.columnar_sources import parquet_ranges, read_records
from holdfast.data.read.source_files import find_files
from holdfast.data.read.text_sources import json_documents
from holdfast.errors import DataError

MAX_ROW_BYTES = 1 << 26  # a longer one is refused
UNIT_BYTES = 1 << 24  # of row groups that are opened at a time


def raw_rows(config: SourceConfig) -> Iterator[str]:
    """Yield each row of a source of kind jsonl or parquet. Raises DataError for a bad file."""
    for path, _ in find_files(config, "data.sources[0]").files:
        if config.kind != "parquet":
            yield from json_documents(path, 0, 0, _as_json, MAX_ROW_BYTES, xxh3_128())
            continue
        refused: list[DataError] = []
        for parts in parquet_ranges([path], (), UNIT_BYTES, refused):
            for part in parts:
                yield from read_records("parquet", *part, "", _as_json, MAX_ROW_BYTES, xxh3_128())
        if refused:
            raise refused[0]


def _as_json(value: Any, where: str, *, bare: bool = False) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)

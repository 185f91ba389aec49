"""500 damaged files: each is refused by name, or read as an independent reader reads it.

A changed byte of plain text is other text, which nothing can tell. So what is read is compared with
Python's own readers of the same bytes, and a refusal must name the source and the file.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import ipc, parquet
from xxhash import xxh3_128

from holdfast.config.sections.data import SourceConfig
from holdfast.data.read.sources import plan_source, read_unit
from holdfast.errors import DataError
from tests.support.corpus import text

TEXTS = [text(i, 12) for i in range(8)]
LIMIT = 1 << 16
CASES = 50  # of each kind of source


def _zstd(data: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(data, asbytes=True))


def _lines() -> bytes:
    return "".join(json.dumps({"text": t}) + "\n" for t in TEXTS).encode()


def _csv() -> bytes:
    out = io.StringIO()
    csv.writer(out).writerows([("n", "text"), *enumerate(TEXTS)])
    return out.getvalue().encode()


def _parquet() -> bytes:
    out = io.BytesIO()
    parquet.write_table(pa.table({"text": TEXTS}), out, row_group_size=3, compression="zstd")
    return out.getvalue()


def _arrow(new: Callable[..., Any]) -> bytes:
    table, out = pa.table({"text": TEXTS}), io.BytesIO()
    with new(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return out.getvalue()


FILES: dict[str, tuple[str, str, bytes]] = {  # kind, name, bytes
    "text": ("text", "a.txt", TEXTS[0].encode()),
    "text.gz": ("text", "a.txt.gz", gzip.compress(TEXTS[0].encode(), mtime=0)),
    "jsonl": ("jsonl", "a.jsonl", _lines()),
    "jsonl.zst": ("jsonl", "a.jsonl.zst", _zstd(_lines())),
    "json": ("jsonl", "a.json", json.dumps([{"text": t} for t in TEXTS]).encode()),
    "csv": ("csv", "a.csv", _csv()),
    "csv.gz": ("csv", "a.csv.gz", gzip.compress(_csv(), mtime=0)),
    "parquet": ("parquet", "a.parquet", _parquet()),
    "arrow stream": ("huggingface", "a.arrow", _arrow(ipc.new_stream)),
    "arrow file": ("huggingface", "a.arrow", _arrow(ipc.new_file)),
}


def damaged(rng: random.Random, data: bytes) -> bytes:
    how = rng.choice(("flip", "flip", "flips", "cut", "zero", "insert", "encode", "wrap", "other"))
    raw = bytearray(data)
    at = rng.randrange(len(raw))
    if how == "flip":
        raw[at] ^= 1 << rng.randrange(8)
    elif how == "flips":
        for _ in range(rng.randint(2, 20)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
    elif how == "cut":
        del raw[at:]
    elif how == "zero":
        raw[at : at + rng.randint(1, 60)] = bytes(min(60, len(raw) - at))
    elif how == "insert":
        raw[at:at] = rng.randbytes(rng.randint(1, 9))
    elif how == "encode":
        words = data.decode("utf-8", "replace")
        return words.encode(rng.choice(("utf-16", "utf-8-sig", "latin-1", "utf-7")), "replace")
    elif how == "wrap":
        return rng.choice((gzip.compress, _zstd))(data)
    else:
        return rng.choice([content for _, _, content in FILES.values()])
    return bytes(raw)


def read(path: Path, kind: str) -> list[str]:
    where = path.parent if kind == "huggingface" else path
    plan = plan_source(SourceConfig(kind=kind, path=str(where)), 0, 0)
    if plan.refused:
        raise plan.refused[0]
    return [t for unit in plan.units for t in read_unit(unit, LIMIT, xxh3_128())]


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_refused_by_name_or_read_the_same(name: str, tmp_path: Path) -> None:
    kind, file, data = FILES[name]
    path = tmp_path / "in" / file
    path.parent.mkdir()
    path.write_bytes(data)
    assert read(path, kind) == (TEXTS[:1] if kind == "text" else TEXTS)
    refused = 0
    for seed in range(CASES):
        path.write_bytes(damaged(random.Random(f"{name} {seed}"), data))
        told = f"{name}, seed {seed}"
        try:
            found = read(path, kind)
        except DataError as refusal:
            error = refusal
        except Exception as fault:
            raise AssertionError(f"{told}: {type(fault).__name__}: {fault}") from fault
        else:
            assert found == read(path, kind), told
            assert not any("\0" in t or "\ufeff" in t for t in found), told
            expected = independent(path.read_bytes(), kind)
            assert expected is None or found == expected, told
            continue
        refused += 1
        assert f"source {kind!r}: {path}" in str(error) or f"{path.parent}" in str(error), told
        assert "\n" not in str(error), told
        assert error.remedy, told
    print(f"{name}: {refused} of {CASES} refused, seeds 0 to {CASES - 1}")
    assert refused


def independent(raw: bytes, kind: str) -> list[str] | None:
    """What Python's own readers find in plain bytes; None for what they cannot judge here."""
    if raw.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")) or kind in ("parquet", "huggingface"):
        return None
    words = raw.decode().replace("\ufeff", "").replace("\r\n", "\n")
    if kind == "text":
        return [words]
    if kind == "csv":
        rows = [row for row in csv.reader(io.StringIO(words, newline="")) if row]
        return [row[rows[0].index("text")] for row in rows[1:]]
    if words.lstrip().startswith("["):
        values = json.loads(words)
    else:
        values = [json.loads(line) if line.strip() else {"text": ""} for line in words.split("\n")]
        values = values[:-1] if words.endswith("\n") or not words else values
    return [v if isinstance(v, str) else v["text"].replace("\ufeff", "") for v in values]

"""The tasks of one process on one unit: *scan* it, and later *tokenise* it.

Each result is one small file: a line of JSON, then bytes whose checksum that line holds. It is
written atomically, so an existing result is complete, and a killed preparation continues with the
units that have none.

    scan      per document: two halves of its xxh3-128 and its length, uint64 [documents, 3]
    tokens    per split: lengths uint32 [documents], tokens uint16 or uint32 [tokens]

A scan row of length 0 is an empty document.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128, xxh3_128_intdigest

from holdfast.core.json_parsing import parse_json
from holdfast.data.files import checksum, write_atomic
from holdfast.data.sources import Unit, encode_document, read_unit, unit_label
from holdfast.errors import CorruptError, DataError

BATCH_BYTES = 1 << 20  # text handed to the tokenizer at a time
SPLITS = ("train", "validation")
DROP, TRAIN, VALIDATION = 0, 1, 2  # a document's lot, uint8

TokenArray = NDArray[np.unsignedinteger[Any]]


class Encoder(Protocol):
    """The part of a tokenizers.Tokenizer that tokenising needs."""

    def encode_batch_fast(self, batch: list[str], *, add_special_tokens: bool) -> list[Any]: ...


@dataclass(frozen=True)
class UnitTokens:
    """Tokens of one unit and split; every document ends with the end token, and begins with the
    begin token if the tokenizer has one."""

    lengths: NDArray[np.uint32]
    tokens: TokenArray


def write_result(path: Path, header: dict[str, Any], payload: bytes) -> None:
    line = json.dumps({**header, "size": len(payload), "xxh3": checksum(payload)}) + "\n"
    write_atomic(path, [line.encode(), payload])


def read_result(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and payload. Raises CorruptError when the bytes are not those that were written."""
    raw = path.read_bytes()
    line, _, payload = raw.partition(b"\n")
    try:
        header = parse_json(line)
        sound = header["size"] == len(payload) and header["xxh3"] == checksum(payload)
    except (ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        raise CorruptError(f"{path} is not what was written")
    return header, payload


def scan_unit(unit: Unit, limit: int, out: Path) -> None:
    """Hash every document of a unit (outer white space does not count) into `out`."""
    seen, rows = xxh3_128(), []
    label = unit_label(unit)
    for text in read_unit(unit, limit, seen):
        stripped = text.strip()
        if stripped:
            digest = xxh3_128_intdigest(encode_document(stripped, label))
            rows.append((digest >> 64, digest & (2**64 - 1), len(encode_document(text, label))))
        else:
            rows.append((0, 0, 0))
    table = np.array(rows, dtype="<u8").reshape(-1, 3)
    write_result(out, {"unit": unit.index, "raw": seen.hexdigest()}, table.tobytes())


def read_scan(path: Path) -> tuple[str, NDArray[np.uint64]]:
    """(hash of the bytes read, rows [documents, 3], mapped: they may be more than memory)."""
    header, payload = read_result(path)
    if not payload:
        return header["raw"], np.zeros((0, 3), dtype="<u8")
    at = path.stat().st_size - len(payload)
    rows = np.memmap(path, dtype="<u8", mode="r", offset=at, shape=(len(payload) // 24, 3))
    return header["raw"], rows


def tokenise_unit(
    unit: Unit,
    limit: int,
    raw: str,
    lots: NDArray[np.uint8],
    tokenizer: Encoder,
    end: int,
    dtype: str,
    out: Path,
    begin: int | None = None,
) -> None:
    """Tokenise the documents of a unit that `lots` [documents] keeps, split by split.

    Raises DataError when the bytes read are not those of the scan (`raw`).
    """
    seen = xxh3_128()
    lengths: dict[int, list[int]] = {TRAIN: [], VALIDATION: []}
    pieces: dict[int, list[TokenArray]] = {TRAIN: [], VALIDATION: []}
    changed = DataError(
        "the source changed while it was being prepared",
        where=unit_label(unit),
        remedy="run the same command again",
    )
    for batch in _batches(read_unit(unit, limit, seen), lots, changed):
        texts = [text for _, text in batch]
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        for (lot, _), encoding in zip(batch, encodings, strict=True):
            ids = encoding.ids
            if ids:
                ids.append(end)
                if begin is not None:
                    ids.insert(0, begin)
                pieces[lot].append(np.array(ids, dtype=dtype))
                lengths[lot].append(len(ids))
    if seen.hexdigest() != raw:
        raise changed
    header: dict[str, Any] = {"unit": unit.index, "dtype": dtype}
    payload = []
    for split, lot in zip(SPLITS, (TRAIN, VALIDATION), strict=True):
        counts = np.array(lengths[lot], dtype="<u4")
        header[split] = {"documents": len(counts), "tokens": int(counts.sum())}
        payload.append(counts.tobytes())
        payload.extend(piece.tobytes() for piece in pieces[lot])
    write_result(out, header, b"".join(payload))


def read_tokens(path: Path, split: str) -> UnitTokens:
    header, payload = read_result(path)
    width = np.dtype(header["dtype"]).itemsize
    at = 0
    for name in SPLITS:
        documents, tokens = header[name]["documents"], header[name]["tokens"]
        if name == split:
            lengths = np.frombuffer(payload, "<u4", documents, at)
            return UnitTokens(
                lengths, np.frombuffer(payload, header["dtype"], tokens, at + 4 * documents)
            )
        at += 4 * documents + width * tokens
    raise KeyError(split)


def _batches(
    texts: Iterator[str], lots: NDArray[np.uint8], changed: DataError
) -> Iterator[list[tuple[int, str]]]:
    """(lot, text) of the kept documents, about BATCH_BYTES characters at a time."""
    batch: list[tuple[int, str]] = []
    held = 0
    for place, text in enumerate(texts):
        if place >= len(lots):
            raise changed
        lot = int(lots[place])
        if lot != DROP:
            batch.append((lot, text))
            held += len(text)
        if held >= BATCH_BYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def perform_task(task: dict[str, Any], tokenizer_of: Callable[[str], Encoder]) -> None:
    """Do one task as it came, JSON-safe, from the preparing process."""
    unit = Unit.from_json(task["unit"])
    if task["do"] == "scan":
        scan_unit(unit, task["limit"], Path(task["out"]))
        return
    lots = np.frombuffer(Path(task["lots"]).read_bytes(), dtype=np.uint8)
    tokenise_unit(
        unit,
        task["limit"],
        task["raw"],
        lots,
        tokenizer_of(task["tokenizer"]),
        task["end"],
        task["dtype"],
        Path(task["out"]),
        task["begin"],
    )

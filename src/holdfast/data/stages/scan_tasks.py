"""The first task on a unit: hash its documents, and have the stages judge them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain as chain_pieces
from math import nan
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from holdfast.data.filters.chain import Chain
from holdfast.data.filters.plain import hash_document
from holdfast.data.filters.shingles import HASHES, signature
from holdfast.data.read.chat_borders import ChatNotes
from holdfast.data.read.files import READ_BYTES
from holdfast.data.read.sources import Unit, read_unit
from holdfast.data.read.text_sources import with_line
from holdfast.data.stages.importance import Features, features
from holdfast.data.stages.unit_files import SPOOL_BYTES, mapped, read_result, write_result
from holdfast.errors import DataError


def scan_unit(unit: Unit, limit: int, out: Path, chain: Chain | None = None) -> None:
    """Hash every document of a unit (outer white space does not count) into `out`, before and
    after the stages of `chain`. If files cannot be read, `out` says so of all of them."""
    seen, rows = xxh3_128(), array("Q")
    refused: list[DataError] = []
    notes = ChatNotes()
    with _StagedRows(chain, out.parent) as staged:
        for text in read_unit(unit, limit, seen, refused, notes):
            row = hash_document(text)
            rows.extend(row)
            staged.add(text, row)
        header: dict[str, Any] = {"unit": unit.index, "raw": seen.hexdigest(), **staged.header()}
        if notes.seen:
            header["notes"] = {
                kind: {name: (count, with_line(where)) for name, (count, where) in names.items()}
                for kind, names in notes.seen.items()
            }
        if refused:
            header["refused"] = [(e.message, e.where, e.remedy) for e in refused]
        write_result(out, header, lambda: chain_pieces([_table(rows).tobytes()], staged.payload()))


def _table(rows: array[int]) -> NDArray[np.uint64]:
    return np.frombuffer(rows, dtype="<u8") if rows else np.zeros(0, dtype="<u8")


class _StagedRows:
    """What the stages make of the documents of a unit; nothing without stages."""

    def __init__(self, chain: Chain | None, folder: Path):
        self._chain = chain
        self._rows, self._reasons, self._scores = array("Q"), array("H"), array("f")
        self._names: dict[tuple[int, str], int] = {}
        self._edits: Counter[tuple[int, str]] = Counter()
        self._signatures = SpooledTemporaryFile(SPOOL_BYTES, dir=str(folder))  # noqa: SIM115
        self._features = SpooledTemporaryFile(SPOOL_BYTES, dir=str(folder))  # noqa: SIM115
        self._ends = array("q")  # of each document's features

    def __enter__(self) -> _StagedRows:
        return self

    def __exit__(self, *_: object) -> None:
        self._signatures.close()
        self._features.close()

    def add(self, text: str, row: tuple[int, int, int]) -> None:
        """Judge a document. row: its own hash and length."""
        if self._chain is None:
            return
        reason, score = 0, nan
        if row[2]:
            outcome = self._chain.judge(text)
            score = nan if outcome.score is None else outcome.score
            if outcome.rule:
                name = outcome.stage, outcome.rule
                reason, row = self._names.setdefault(name, len(self._names) + 1), (0, 0, 0)
            else:
                row = row if outcome.text == text else hash_document(outcome.text)
                self._edits.update({(stage, what): n for stage, what, n in outcome.edits})
        if self._chain.shingle_words:
            has_words = row[2] > 0
            values = signature(outcome.text if has_words else "", self._chain.shingle_words)
            self._signatures.write(values.astype("<u2").tobytes())
        if (recipe := self._chain.importance) is not None:
            last = self._ends[-1] if self._ends else 0
            buckets = np.zeros(0, np.uint16)
            if row[2]:
                buckets = features(outcome.text, recipe["gram_words"], recipe["buckets"])
            self._features.write(buckets.astype("<u2").tobytes())
            self._ends.append(last + len(buckets))
        self._rows.extend(row)
        self._reasons.append(reason)
        self._scores.append(score)

    def header(self) -> dict[str, Any]:
        if self._chain is None:
            return {}
        return {
            "documents": len(self._reasons),
            "reasons": list(self._names),
            "edits": sorted([stage, what, n] for (stage, what), n in self._edits.items()),
            **({"features": self._ends[-1]} if self._ends else {}),
        }

    def payload(self) -> Iterator[bytes]:
        if self._chain is None:
            return
        yield _table(self._rows).tobytes()
        yield np.array(self._reasons, dtype="<u2").tobytes()
        yield np.array(self._scores, dtype="<f4").tobytes()
        yield np.array(self._ends, dtype="<i8").tobytes()
        for file in (self._features, self._signatures):
            file.seek(0)
            while piece := file.read(READ_BYTES):
                yield piece


def read_refused(path: Path) -> list[DataError]:
    """Files of a unit that could not be read, when it was scanned."""
    header, _ = read_result(path)
    return [
        DataError(message, where=where, remedy=remedy)
        for message, where, remedy in header.get("refused", ())
    ]


def read_notes(path: Path) -> dict[str, dict[str, tuple[int, str]]]:
    """What the rows of a unit of chat data say that is not trained on (`ChatNotes.seen`)."""
    header, _ = read_result(path)
    return header.get("notes", {})  # type: ignore[no-any-return]


def read_scan(path: Path) -> tuple[str, Callable[[], NDArray[np.uint64]]]:
    """(hash of the bytes read, what maps the rows [documents, 3])."""
    header, at = read_result(path)
    count = header["documents"] * 3 if "documents" in header else header["size"] // 8
    return header["raw"], lambda: mapped(path, "<u8", at, count).reshape(-1, 3)


@dataclass(frozen=True)
class StagedUnit:
    """What the stages made of the documents of a unit. Each table is mapped when it is used."""

    path: Path
    at: int  # begin of the rows in the file
    documents: int
    values: int  # of all signatures
    names: tuple[tuple[int, str], ...]  # (stage, rule)
    edits: tuple[tuple[int, str, int], ...]  # (stage, what was changed, how often)
    grams: int | None  # n-grams of all documents; None: they are not counted

    def rows(self) -> NDArray[np.uint64]:
        """[documents, 3], of the document as it stays; 0 if it does not"""
        return mapped(self.path, "<u8", self.at, 3 * self.documents).reshape(-1, 3)

    def reasons(self) -> NDArray[np.uint16]:
        """[documents]: 0, or 1 + the index in `names`"""
        return mapped(self.path, "<u2", self.at + 24 * self.documents, self.documents)

    def scores(self) -> NDArray[np.float32]:
        """[documents]: the number that left it out, or that `score` gives it; nan: none"""
        return mapped(self.path, "<f4", self.at + 26 * self.documents, self.documents)

    def signatures(self) -> NDArray[np.uint16]:
        """[documents, HASHES], or [0, HASHES]"""
        at = self.at + 30 * self.documents
        if self.grams is not None:
            at += 8 * self.documents + 2 * self.grams
        return mapped(self.path, "<u2", at, self.values).reshape(-1, HASHES)

    def features(self) -> Features:
        """The n-grams of the documents as they stay."""
        at, grams = self.at + 30 * self.documents, self.grams or 0
        ends = mapped(self.path, "<i8", at, self.documents)
        return Features(ends, mapped(self.path, "<u2", at + 8 * self.documents, grams))


def read_staged(path: Path) -> StagedUnit:
    """Return what a scan with stages found."""
    header, at = read_result(path)
    count, grams = header["documents"], header.get("features")
    used = 54 * count + (0 if grams is None else 8 * count + 2 * grams)
    return StagedUnit(
        path,
        at + 24 * count,
        count,
        (header["size"] - used) // 2,
        tuple((stage, rule) for stage, rule in header["reasons"]),
        tuple((stage, what, n) for stage, what, n in header["edits"]),
        grams,
    )

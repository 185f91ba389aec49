"""The record of a model: a file of lines, each of which has the hash of the line before it.

    record/record.jsonl    one entry a line: data, training, evaluation, approval, export, and
                           attestation, whose evidence lies in record/evidence-*
    record/statement.json  an in-toto statement of it
    record.sig             the signature of the folder `record`, by model-signing

A line is only added. Each has a number, a time, a kind, a body, and `previous`: the SHA-256 of the
line before. So a changed, removed or inserted line breaks the chain at a place that has a number.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.json_parsing import parse_json
from holdfast.errors import RunFolderError
from holdfast_platform.registry.registry import sha256_of

FOLDER, FILE, SIGNATURE = "record", "record.jsonl", "record.sig"
KINDS = ("data", "training", "evaluation", "approval", "export", "attestation", "readiness")
BEGIN = "0" * 64
"""`previous` of the first line."""


@dataclass(frozen=True)
class Entry:
    """One line of a record."""

    number: int  # from 1
    time: float  # seconds since the epoch
    kind: str  # of KINDS
    body: Mapping[str, Any]
    previous: str  # SHA-256 of the line before

    def to_line(self) -> bytes:
        return json.dumps(vars(self), sort_keys=True, separators=(",", ":")).encode()


@dataclass(frozen=True)
class ModelRecord:
    """The entries of a record, and what is wrong with its chain."""

    entries: tuple[Entry, ...]
    problems: tuple[str, ...] = ()
    head: str = BEGIN  # SHA-256 of the last line

    def last(self, kind: str) -> Mapping[str, Any] | None:
        """Return the newest body of a kind."""
        return next((e.body for e in reversed(self.entries) if e.kind == kind), None)

    def all(self, kind: str) -> list[Mapping[str, Any]]:
        return [entry.body for entry in self.entries if entry.kind == kind]


def record_path(folder: Path) -> Path:
    return folder / FOLDER / FILE


def read_record(folder: Path) -> ModelRecord:
    """Read the record of a run folder. A run without one has an empty record."""
    path = record_path(folder)
    if not path.is_file():
        return ModelRecord(())
    data = path.read_bytes()
    entries: list[Entry] = []
    problems: list[str] = []
    previous = BEGIN
    lines = data.split(b"\n")
    if lines[-1]:
        problems.append(f"line {len(lines)} is cut short")
    for number, line in enumerate(lines[:-1], 1):
        try:
            value = parse_json(line)
            entry = Entry(*(value[k] for k in ("number", "time", "kind", "body", "previous")))
            is_whole = entry.to_line() == line and entry.kind in KINDS
        except (ValueError, KeyError, TypeError):
            is_whole = False
        if not is_whole:
            problems.append(f"line {number} is not what was written")
        else:
            if entry.number != number:
                problems.append(f"line {number} has the number {entry.number}: a line is missing")
            if entry.previous != previous:
                problems.append(f"line {number} does not follow line {number - 1}: one was changed")
            entries.append(entry)
        previous = hashlib.sha256(line).hexdigest()
    return ModelRecord(tuple(entries), tuple(problems), previous)


def append(folder: Path, kind: str, body: Mapping[str, Any], now: float | None = None) -> Entry:
    """Add a line, durably. Raises RunFolderError for a record whose chain is broken."""
    record = read_record(folder)
    if record.problems:
        raise RunFolderError(
            f"the record is not complete: {record.problems[0]}",
            where=str(record_path(folder)),
            remedy="restore it from a backup; no line is added to a broken record",
        )
    stamp = round(time.time() if now is None else now, 3)
    entry = Entry(len(record.entries) + 1, stamp, kind, body, record.head)
    path = record_path(folder)
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        file.write(entry.to_line() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return entry


def file_hashes(folder: Path) -> dict[str, str]:
    """Return path -> SHA-256 of each file below a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): sha256_of(path) for path in paths}


def changed_names(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> Sequence[str]:
    """Return the names whose values differ, in order."""
    names = recorded.keys() | here.keys()
    return sorted(name for name in names if recorded.get(name) != here.get(name))

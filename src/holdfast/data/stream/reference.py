"""Log-probabilities of a dataset's targets under the reference model: computed once, then read.

They lie next to the dataset, in a folder whose name says what they follow from:

    reference/<key>/piece-00000       samples of one source and split, float32 [samples, S]
    reference/<key>/reference.json    written last: the number of pieces, and their digest

Each piece begins with a line of JSON that has its checksum (`unit_files.write_result`). So a piece
is complete or absent, and a run that was killed computes the rest. Bits differ between devices and
numbers of threads, so the stored bits count. A run never computes them a second time while they
are there.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from holdfast.core.json_parsing import parse_json
from holdfast.data.read.files import canonical_json, write_atomic
from holdfast.data.stages.unit_files import read_result, write_result
from holdfast.data.stream.dataset import Dataset
from holdfast.errors import CorruptError, DataError

REFERENCES, MANIFEST = "reference", "reference.json"
PIECE_TOKENS = 1 << 16
"""Tokens of a piece: what a kill loses of each replica at most."""
TEACHER_IDS, TEACHER_LOGPS = "teacher_ids", "teacher_logps"
"""Fields of a teacher's records, and side tensors [B, S, K]: token ids and log-probabilities."""
LOGPS = np.dtype("<f4")
"""What is stored of a target: its log-probability."""
KEY_CHARACTERS = 8  # of each checksum in a key
TEACH_REMEDY = "compute them: holdfast data teach RUN.yaml"
REMEDY = "remove the folder: the next start computes the log-probabilities again, and says so"


@dataclass(frozen=True)
class ReferenceOrigin:
    """What reference log-probabilities follow from."""

    dataset: str  # version
    weights: str  # checksum of the reference's weights, or the seed of initial ones
    precision: str  # train.precision
    device: str  # kind of device, which decides the kernel of attention
    sequence_length: int  # tokens of a sample
    long_rows: str  # data.chat.long_rows
    order: str = ""  # what of data.curriculum decides the content of a sample

    @property
    def key(self) -> str:
        """The name of the folder."""
        said = self.dataset[:KEY_CHARACTERS], self.weights[:KEY_CHARACTERS], self.precision
        cut = "-cut" if self.long_rows == "cut" else ""
        return "-".join((*said, self.device, f"{self.sequence_length}{cut}{self.order}"))

    def teacher_key(self, top_k: int, temperature: float) -> str:
        """The name of the folder of a teacher's likeliest tokens."""
        return f"teacher-{self.key}-k{top_k}-t{temperature:g}"


@dataclass(frozen=True)
class ReferencePiece:
    """Samples [start, stop) of one source and split."""

    split: str
    source: int
    start: int
    stop: int


def record_type(key: str) -> np.dtype[Any]:
    """What is stored of each target, by the name of the folder."""
    found = re.fullmatch(r"teacher-.*-k(\d+)-t.+", key)
    if found is None:
        return LOGPS
    count = int(found[1])
    return np.dtype([(TEACHER_IDS, "<i4", (count,)), (TEACHER_LOGPS, "<f4", (count,))])


def reference_folder(dataset: Dataset, key: str) -> Path:
    return dataset.folder / REFERENCES / key


def cut_pieces(sizes: Mapping[str, Sequence[int]], length: int) -> list[ReferencePiece]:
    """sizes: samples of each source, by split. length: of a sample."""
    step = max(1, PIECE_TOKENS // length)
    return [
        ReferencePiece(split, source, start, min(start + step, size))
        for split, by_source in sizes.items()
        for source, size in enumerate(by_source)
        for start in range(0, size, step)
    ]


class ReferenceStore:
    """The pieces in one folder. length: tokens of a sample. `dtype`: of what is stored of a
    target."""

    def __init__(self, folder: Path, pieces: Sequence[ReferencePiece], length: int):
        self.dtype = record_type(folder.name)
        self.folder, self.pieces, self.length = folder, tuple(pieces), length
        self._places = {
            (piece.split, piece.source, piece.start): number
            for number, piece in enumerate(self.pieces)
        }
        self._step = max(1, PIECE_TOKENS // length)
        self._mapped: dict[int, NDArray[Any]] = {}

    def path(self, number: int) -> Path:
        return self.folder / f"piece-{number:05d}"

    @property
    def is_complete(self) -> bool:
        return (self.folder / MANIFEST).exists()

    def present(self) -> list[bool]:
        """Which pieces are here. Of a complete set, only their existence is looked at. If it lacks
        one, or is not complete yet, pieces are read, and those that are damaged are removed."""
        if self.is_complete:
            if all(self.path(number).exists() for number in range(len(self.pieces))):
                return [True] * len(self.pieces)
            (self.folder / MANIFEST).unlink()
        return [self._is_sound(number) for number in range(len(self.pieces))]

    def _is_sound(self, number: int) -> bool:
        path = self.path(number)
        try:
            self._read_header(number)
        except FileNotFoundError:
            return False
        except CorruptError:
            path.unlink(missing_ok=True)
            return False
        return True

    def _read_header(self, number: int) -> tuple[dict[str, Any], int]:
        header, at = read_result(self.path(number))
        if header["piece"] != asdict(self.pieces[number]) or header["length"] != self.length:
            raise CorruptError(f"{self.path(number)} is another piece")
        return header, at

    def read(self, number: int) -> NDArray[Any]:
        """[samples, S], mapped."""
        if (found := self._mapped.get(number)) is not None:
            return found
        path, piece = self.path(number), self.pieces[number]
        try:
            with path.open("rb") as file:
                at = len(file.readline())
            shape = piece.stop - piece.start, self.length
            mapped: Any = np.memmap(path, self.dtype, "r", at, shape)
        except (OSError, ValueError) as error:
            what = "reference log-probabilities" if self.dtype == LOGPS else "a teacher's tokens"
            remedy = REMEDY if self.dtype == LOGPS else TEACH_REMEDY
            raise DataError(
                f"{what} cannot be read: {error}", where=str(path), remedy=remedy
            ) from None
        self._mapped[number] = mapped
        return self._mapped[number]

    def sample(self, split: str, source: int, sample: int) -> NDArray[Any]:
        """The log-probability of each target of a sample; 0 for one that carries no loss: [S]"""
        start = sample // self._step * self._step
        values: NDArray[Any] = self.read(self._places[split, source, start])[sample - start]
        return values

    def write(self, number: int, values: NDArray[Any]) -> None:
        """Write a piece. Several processes may write the same one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        header = {"piece": asdict(self.pieces[number]), "length": self.length}
        body = np.ascontiguousarray(values, dtype=self.dtype).tobytes()
        private = self.folder / f".{uuid.uuid4().hex}"
        write_result(private, header, lambda: iter([body]))
        os.replace(private, self.path(number))
        self._mapped.pop(number, None)

    def digest(self) -> str:
        """Of all pieces; reads their checksums alone."""
        state = xxh3_128()
        for number in range(len(self.pieces)):
            with self.path(number).open("rb") as file:
                state.update(str(parse_json(file.readline())["xxh3"]).encode())
        return state.hexdigest()

    def finish(self) -> str:
        """Say that all pieces are here, if that is not said yet; returns their digest."""
        if self.is_complete:
            return str(parse_json((self.folder / MANIFEST).read_bytes())["digest"])
        digest = self.digest()
        for left in self.folder.glob(".*"):  # of a writer that was killed
            with suppress(FileNotFoundError):
                left.unlink()
        said = {"key": self.folder.name, "pieces": len(self.pieces), "digest": digest}
        private = self.folder / f"{MANIFEST}.{uuid.uuid4().hex}"
        write_atomic(private, [canonical_json(said)], sync=True)
        os.replace(private, self.folder / MANIFEST)
        return digest


def check_reference(folder: Path) -> list[str]:
    """What is wrong with a complete set, one sentence each. Reads every byte. A set that is still
    being computed has nothing wrong."""
    if not (folder / MANIFEST).exists():
        return []
    try:
        said = json.loads((folder / MANIFEST).read_bytes())
        state = xxh3_128()
        for number in range(said["pieces"]):
            path = folder / f"piece-{number:05d}"
            header, _ = read_result(path)
            state.update(header["xxh3"].encode())
        if state.hexdigest() != said["digest"]:
            return [f"{folder}: the pieces are not those that were written"]
    except FileNotFoundError as error:
        return [f"{error.filename} is missing"]
    except (CorruptError, ValueError, KeyError, TypeError) as error:
        return [
            str(error) if isinstance(error, CorruptError) else f"{folder / MANIFEST} is damaged"
        ]
    return []

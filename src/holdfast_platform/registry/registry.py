"""Versions of a model in a run store: files by their SHA-256, and an index that only grows.

The index is objects `index/N.json`, each created once. A writer that loses the race for a number
reads the winner's entry and decides again.
"""

from __future__ import annotations

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.core.json_parsing import parse_json
from holdfast.errors import CorruptError, UserError
from holdfast.evaluation.results import KeptResults, TaskResults
from holdfast.model.new_folder import new_folder
from holdfast.wire.store.run_store import AlreadyExistsError, RunStore

FOLDERS = ("index/", "files/", "results/")
_PIECE_BYTES = 8 << 20


class RegistryError(UserError):
    """A version that is not there, or an operation that makes no sense now."""


@dataclass
class State:
    """What the index says."""

    versions: dict[int, dict[str, Any]] = field(default_factory=dict)  # number -> its entry
    promoted: list[int] = field(default_factory=list)  # the last one is promoted

    def take(self, entry: Mapping[str, Any]) -> None:
        """Take the next entry of the index."""
        if entry["kind"] == "add":
            self.versions[entry["version"]] = dict(entry)
        elif entry["kind"] == "promote":
            self.promoted.append(entry["version"])
        elif entry["kind"] == "rollback":
            self.promoted.pop()

    @property
    def current(self) -> int | None:
        """The promoted version; None if there is none."""
        return self.promoted[-1] if self.promoted else None

    def find(self, text: str) -> int:
        """Return the version of a number, or of the word promoted. Raises RegistryError."""
        number = self.current if text == "promoted" else int(text) if text.isdecimal() else None
        if number in self.versions:
            assert number is not None
            return number
        there = ", ".join(map(str, self.versions)) or "none"
        raise RegistryError(
            f"there is no version {text}", where="registry", remedy=f"there are: {there}"
        )


Decide = Callable[[State], dict[str, Any]]
"""Returns the next entry for a state. Raises UserError if there may be none."""


class Registry(ABC):
    """The versions of one model."""

    @abstractmethod
    def state(self) -> State:
        """Read what is there."""

    @abstractmethod
    def add(self, folder: Path, source: Mapping[str, Any]) -> int:
        """Add the files of a model's folder. Return the version's number."""

    @abstractmethod
    def record(self, decide: Decide) -> dict[str, Any]:
        """Enter what `decide` returns, and return it."""

    @abstractmethod
    def fetch(self, version: int, to: Path) -> None:
        """Write the files of a version into a new folder."""

    @abstractmethod
    def results(self, version: int) -> TaskResults:
        """Return the results of a version's tasks."""

    def roll_back(self) -> dict[str, Any]:
        """Promote the version that was promoted before. Raises RegistryError if there is none."""

        def decide(state: State) -> dict[str, Any]:
            if len(state.promoted) < 2:
                raise RegistryError(
                    "no version was promoted before", where="registry", remedy="promote another one"
                )
            return {"kind": "rollback", "version": state.promoted[-2], "from": state.promoted[-1]}

        return self.record(decide)


class StoreRegistry(Registry):
    """A registry in a folder or a bucket."""

    def __init__(self, store: RunStore):
        self._store = store

    def state(self) -> State:
        state = State()
        for number, key in enumerate(self._store.list("index/")):
            try:
                if key != _index_key(number):
                    raise ValueError(f"{_index_key(number)} is missing")
                state.take(parse_json(self._store.get(key)))
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise RegistryError(
                    f"{key} does not continue the index of a registry ({error})",
                    where="registry",
                    remedy="name the folder of a registry, or restore the entry",
                ) from None
        return state

    def add(self, folder: Path, source: Mapping[str, Any]) -> int:
        files = {}
        for path in sorted(path for path in folder.iterdir() if path.is_file()):
            digest = sha256_of(path)
            key = f"files/{digest}"
            try:
                self._store.create(key, _pieces(path))
            except AlreadyExistsError:  # of another version
                if self._store.size(key) != path.stat().st_size:
                    raise _damaged(key) from None
            files[path.name] = {"sha256": digest, "bytes": path.stat().st_size}

        def decide(state: State) -> dict[str, Any]:
            version = max(state.versions, default=0) + 1
            return {"kind": "add", "version": version, "files": files, "source": dict(source)}

        return int(self.record(decide)["version"])

    def record(self, decide: Decide) -> dict[str, Any]:
        while True:
            number = len(self._store.list("index/"))
            entry = {**decide(self.state()), "time": round(time.time(), 3)}
            with suppress(AlreadyExistsError):  # another writer was faster
                self._store.create(_index_key(number), json.dumps(entry).encode())
                return entry

    def fetch(self, version: int, to: Path) -> None:
        with new_folder(to) as partial:
            for name, file in self.state().versions[version]["files"].items():
                with (partial / name).open("wb") as out:
                    key = f"files/{file['sha256']}"
                    for start in range(0, file["bytes"], _PIECE_BYTES):
                        piece = bytearray(min(_PIECE_BYTES, file["bytes"] - start))
                        try:
                            self._store.read_into(key, start, memoryview(piece))
                        except CorruptError:  # it is shorter than it was
                            raise _damaged(key) from None
                        out.write(piece)
                if sha256_of(partial / name) != file["sha256"]:
                    raise _damaged(key)

    def results(self, version: int) -> TaskResults:
        return KeptResults(self._store, f"results/{version:010d}")


def _damaged(key: str) -> RegistryError:
    return RegistryError(
        f"{key} has other bytes than it had",
        where="registry",
        remedy="restore that file, or remove it and add a version that has it again",
    )


def _index_key(number: int) -> str:
    return f"index/{number:010d}.json"


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Finished replays of a study, one JSON line each, so that an interrupted study can continue.

The file stands in the folder of `--out`. A line is found only by a digest of all inputs of its
replay. So another run file, trace or policy never gets an older result.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import holdfast
import holdfast_lab

FILE = "replays.jsonl"
_SOURCES = (
    Path(holdfast_lab.__path__[0]),
    *(Path(holdfast.__path__[0]) / room for room in ("policy", "plan")),
)


class KeptReplays:
    """Results by key. Without a folder nothing is kept."""

    def __init__(self, folder: Path | None = None) -> None:
        self._path = None if folder is None else folder / FILE
        self._found: dict[str, Any] = {}
        self.reused = self._made = 0
        if self._path is not None and self._path.is_file():
            # The lines that are complete. A kill may have cut the last one, which is dropped.
            data = self._path.read_bytes()
            complete = data[: data.rfind(b"\n") + 1]
            for line in complete.splitlines():
                try:
                    row = json.loads(line)
                    self._found[row["key"]] = row["result"]
                except (ValueError, KeyError, TypeError):
                    continue
            if len(complete) < len(data):
                self._path.write_bytes(complete)

    def get(self, key: str) -> Any:
        """The result of a replay, or None."""
        found = self._found.get(key)
        self.reused += found is not None
        return found

    def put(self, key: str, result: Any) -> None:
        """Keep a result; it is on the disk when this returns. Raises OSError."""
        self._made += 1
        if self._path is None:
            return
        line = json.dumps({"key": key, "result": result}, separators=(",", ":"))
        with self._path.open("a", encoding="utf-8") as out:
            out.write(f"{line}\n")

    @contextmanager
    def counted(self, total: int) -> Iterator[None]:
        """Inside, Ctrl-C ends with a sentence that says what is kept."""
        try:
            yield
        except KeyboardInterrupt:
            if self._path is None:
                raise KeyboardInterrupt("--out FOLDER keeps finished replays") from None
            done = self.reused + self._made
            if not done:
                raise KeyboardInterrupt("no replay was complete") from None
            kept = f"{done} of {total} replays are kept in {self._path.parent}"
            raise KeyboardInterrupt(f"{kept}; the same command continues") from None


def key_of(*inputs: object) -> str:
    """A digest of inputs whose `repr` says all of them, and of the code that a result follows
    from."""
    return sha256(repr((_code(), *inputs)).encode()).hexdigest()[:32]


@cache
def _code() -> str:
    """A digest of the sources of simulation, policies and plans."""
    digest = sha256()
    for folder in _SOURCES:
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()

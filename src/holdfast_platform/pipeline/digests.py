"""Digests of what stages take and make: equal for equal bytes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.read_ahead import ReadAhead
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.core.json_parsing import parse_json
from holdfast.core.sharding.boxes import Box
from holdfast.errors import RunFolderError
from holdfast.launch.run.runs import open_run
from holdfast.wire.store.publish import replace_file
from holdfast_platform.pipeline.stages import Kind
from holdfast_platform.registry.registry import sha256_of

MANIFEST = "manifest.json"


class Digests:
    """Digests of files and folders. A file whose size and time of change are as before is not read
    again. file: where they are kept between starts, if at all."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._kept: dict[str, list[Any]] = {}
        try:
            self._kept = parse_json(file.read_text("utf-8")) if file else {}
        except (OSError, ValueError):  # none yet, or cut short: all is read again
            self._kept = {}

    def save(self) -> None:
        if self._file is not None:
            replace_file(self._file, json.dumps(self._kept))

    def of_path(self, path: Path) -> str:
        """Return the digest of a file, or of the names and bytes of all files in a folder. Raises
        OSError."""
        if not path.is_dir():
            return self._of_file(path)
        whole = hashlib.sha256()
        for each in sorted(path.rglob("*")):
            if each.is_file():
                name = each.relative_to(path).as_posix()
                whole.update(f"{name}\0{self._of_file(each)}\n".encode())
        return whole.hexdigest()

    def _of_file(self, path: Path) -> str:
        about = path.stat()
        mark = [about.st_size, about.st_mtime_ns, about.st_ino]
        kept = self._kept.get(str(path))
        if kept is not None and kept[:3] == mark:
            return str(kept[3])
        digest = sha256_of(path)
        self._kept[str(path)] = [*mark, digest]
        return digest

    def of_result(self, path: Path, kind: Kind) -> str:
        """Return the digest of what a stage made. Raises OSError, UserError."""
        return _OF_KIND.get(kind, Digests.of_path)(self, path)

    def _of_dataset(self, path: Path) -> str:
        return self.of_path(path / MANIFEST)  # has a checksum of every other file

    def _of_run(self, path: Path) -> str:
        return run_digest(path)


_OF_KIND: Mapping[Kind, Callable[[Digests, Path], str]] = {
    Kind.DATASET: Digests._of_dataset,
    Kind.RUN: Digests._of_run,
}


def run_digest(folder: Path) -> str:
    """Return the digest of the weights of a run's newest checkpoint: names, shapes and bytes. The
    layout does not matter. Raises UserError."""
    run = open_run(folder)
    commits = list_commits(run.store)
    if not commits:
        raise RunFolderError(
            "this run has no checkpoint", where=run.place, remedy="train it further"
        )
    checkpoint = Checkpoint.open(run.store, commits[0])
    weights = sorted(
        (each for each in checkpoint.tensors if each.name.startswith("model.")),
        key=lambda each: each.name,
    )
    ahead = ReadAhead(checkpoint, [each.name for each in weights])
    digest = hashlib.sha256()
    for each in weights:
        digest.update(f"{each.name} {each.dtype} {list(each.shape)}\n".encode())
        buffer = bytearray(each.nbytes)
        ahead.read(Box(each.name, (0,) * len(each.shape), tuple(each.shape)), memoryview(buffer))
        digest.update(buffer)
    return digest.hexdigest()


def text_digest(value: Any) -> str:
    """Return the digest of a value as JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=os.fspath)
    return hashlib.sha256(text.encode()).hexdigest()

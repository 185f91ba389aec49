"""What a worker of a Ray cluster does for a preparation: one task, with bytes instead of files.

A worker must give what this machine would give. So it refuses to work with other versions of
Python, Holdfast and the tokenizer's library: `python-stdlib` reads Python's own library.
"""

from __future__ import annotations

import json
import os
import platform
import socket
from functools import lru_cache
from importlib import import_module, metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from xxhash import xxh3_128_hexdigest

from holdfast.data.read.sources import Unit
from holdfast.data.stages.chat_tokens import Encoder
from holdfast.data.stages.task_pool import error_to_json
from holdfast.data.stages.unit_tasks import perform_task
from holdfast.errors import DataError

PACKAGES = ("holdfast", "tokenizers", "py3langid")


def versions() -> dict[str, str]:
    """What the result of a task depends on."""
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def perform_rows(
    rows: dict[str, Any], tokenizer: Any, versions: dict[str, str]
) -> dict[str, list[Any]]:
    """Do the tasks of some rows. tokenizer: the reference of the bytes of a tokenizer.json."""
    os.environ.update(RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    out: dict[str, list[Any]] = {"number": [], "result": [], "error": []}
    for number, task, lots in zip(rows["number"], rows["task"], rows["lots"], strict=True):
        result, error = b"", ""
        try:
            _refuse_other_versions(versions)
            result = _perform(json.loads(task), bytes(lots), tokenizer)
        except Exception as problem:
            error = json.dumps(error_to_json(problem))
        out["number"].append(int(number))
        out["result"].append(result)
        out["error"].append(error)
    return out


def _perform(task: dict[str, Any], lots: bytes, tokenizer: Any) -> bytes:
    unit = Unit.from_json(task["unit"])
    for path, *_ in unit.parts:
        if os.path.isabs(path) and not os.path.exists(path):
            raise DataError(
                f"the machine {socket.gethostname()} of the Ray cluster has no {path}",
                where=f"source {unit.name or unit.kind!r}",
                remedy="put the sources on a disk that all its machines share",
            )
    for _, recipe in task["stages"] or ():
        for path in (recipe[key] for key in ("place", "table") if key in recipe):
            if not os.path.exists(path):
                raise DataError(
                    f"the machine {socket.gethostname()} of the Ray cluster has no {path}",
                    where="data.stages",
                    remedy="put data.folder and the files of stages on a disk that all its "
                    "machines share",
                )
    with TemporaryDirectory(prefix="holdfast-prepare-") as folder:
        places = {name: str(Path(folder) / name) for name in ("out", "lots")}
        Path(places["lots"]).write_bytes(lots)
        perform_task({**task, **places}, lambda path: _tokenizer(tokenizer))
        return Path(places["out"]).read_bytes()


def _tokenizer(reference: Any) -> Encoder:
    content: bytes = import_module("ray").get(reference)
    return _loaded(xxh3_128_hexdigest(content), content)


@lru_cache(maxsize=1)
def _loaded(digest: str, content: bytes) -> Encoder:
    from holdfast.data.read.vocabulary import load_tokenizer

    with TemporaryDirectory(prefix="holdfast-prepare-") as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_bytes(content)
        return load_tokenizer(path)


def _refuse_other_versions(wanted: dict[str, str]) -> None:
    other = [f"{name} {have}" for name, have in versions().items() if have != wanted[name]]
    if other:
        raise DataError(
            f"the machine {socket.gethostname()} of the Ray cluster has {', '.join(other)}, and "
            f"this one has other versions",
            where="--on ray",
            remedy="install there: "
            + ", ".join(f"{name} {version}" for name, version in wanted.items()),
        )

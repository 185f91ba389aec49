"""What `train` writes into a run folder before a run starts, and what it refuses to start on.

run.yaml           the run file as it was read
resolved.json      every value, its origin, the overrides, the dataset
environment.json   versions, git state, hardware
"""

from __future__ import annotations

import errno
import json
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from holdfast.cli.runs import FAR_SECONDS, RESOLVED, read_resolved, secret_of, trainer_answers
from holdfast.config.identity import config_hash, refuse_other_run
from holdfast.config.load import Loaded
from holdfast.elastic.ending import trains_alone
from holdfast.errors import CorruptError, OutOfSpaceError, RunFolderError
from holdfast.plan.hardware import Machine
from holdfast.wire.runstore import FolderStore, MissingKeyError
from holdfast.wire.secret import Secret
from holdfast.wire.stores import check
from holdfast.wire.term import GENERATIONS, TERMS, asks, newest_generation, newest_term, object_of

FIRST = frozenset({"run.yaml", "environment.json"})
"""What a start that was cut short may leave before `resolved.json` makes it a run folder."""

PACKAGES = ("holdfast", "torch", "numpy", "pydantic", "tokenizers", "safetensors", "xxhash",
            "httptools", "psutil", "rich", "typer")  # fmt: skip


MOST_ASKED = 64
"""Nodes of a run that are asked whether they are still there: if it is alive, so is one of them."""


def refuse_in_use(folder: Path) -> None:
    """Raises RunFolderError when a trainer of this run folder answers: who holds the newest term,
    or a node of the newest generation, which may be about to open the next. (The term that a
    trainer opens is what decides; this asks before anything in the folder is touched.)"""
    secret = secret_of(folder)
    if secret is None:
        return
    store = FolderStore(folder)
    _, holder = newest_term(store)
    if holder is None:
        return
    told = f"process {holder.get('pid')} on {holder.get('node')}"
    if not asks(secret)(str(holder.get("address", ""))):
        node = _anybody(store, secret)
        if node is None:
            return
        told = f"node {node} is at work"
    raise RunFolderError(
        f"another trainer uses this run folder: {told}",
        where=str(folder),
        remedy="stop it, or choose another with folder=...",
    )


def refuse_alone(folder: Path) -> None:
    """Raises RunFolderError where somebody trains without other nodes."""
    _, holder = newest_term(FolderStore(folder))
    if holder is not None and holder.get("alone") and trainer_answers(folder):
        raise trains_alone(holder, str(folder))


def _anybody(store: FolderStore, secret: Secret) -> str | None:
    """A node of the newest generation that answers."""
    newest = newest_generation(store)
    try:
        said = dict(object_of(store, newest).get("agents", {})) if newest else {}
    except (CorruptError, MissingKeyError):
        return None
    names = sorted(said)[:MOST_ASKED]
    if not names:
        return None
    ask = asks(secret, FAR_SECONDS)
    with ThreadPoolExecutor(len(names), "ask") as threads:
        answers = threads.map(lambda name: ask(str(said[name].get("address", ""))), names)
        return next((name for name, there in zip(names, answers, strict=True) if there), None)


def refuse_other(folder: Path, loaded: Loaded, dataset_version: str) -> None:
    """Raises RunFolderError when the folder belongs to a run that computes something else, or is
    a folder with other things in it."""
    stored = read_resolved(folder) or _just_begun(folder)
    if stored is None:
        return
    refuse_other_run(stored["config"], loaded.config, str(folder))
    before = stored.get("dataset", {}).get("version", dataset_version)
    if before != dataset_version:
        raise RunFolderError(
            f"the run was trained on dataset {before}, and data.folder holds {dataset_version}",
            where=str(folder),
            remedy="name the folder of that dataset, or start over with --fresh",
        )


def refuse_foreign(folder: Path) -> None:
    """Raises RunFolderError for a folder with things in it that no `train` put there."""
    found = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    foreign = [name for name in found if name not in FIRST and not name.startswith(".tmp-")]
    if foreign and not (folder / RESOLVED).exists():  # another node may have begun just now
        raise RunFolderError(
            f"this folder is not a run folder and has things in it ({', '.join(foreign[:3])})",
            where=str(folder),
            remedy="choose another with folder=..., or empty it",
        )


def _just_begun(folder: Path) -> dict[str, Any] | None:
    """What another node has written since it was not there."""
    refuse_foreign(folder)
    return read_resolved(folder)


def identity(folder: Path) -> tuple[int, int] | None:
    """Which folder lies at that path; None for none."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def begun_beside(
    folder: Path, before: tuple[int, int] | None, loaded: Loaded, dataset_version: str
) -> bool:
    """Whether another node that was started with --fresh has begun this folder: it is another one
    than lay there `before`, when this command began, or one of this run that has no term yet."""
    if identity(folder) != before:
        return True
    try:
        refuse_other(folder, loaded, dataset_version)
    except RunFolderError:
        return False
    store = FolderStore(folder)
    return not any(store.list(prefix) for prefix in (TERMS, GENERATIONS, "commits/"))


def set_aside(folder: Path) -> Path | None:
    """Move a run folder to `<folder>.old-<n>`; None when there was nothing to move.

    Raises RunFolderError for a folder that somebody uses, or that no `train` made: it is not ours
    to move.
    """
    if not folder.exists():
        return None
    refuse_in_use(folder)
    refuse_foreign(folder)
    number = 1
    while True:
        target = folder.with_name(f"{folder.name}.old-{number}")
        if not target.exists():
            break
        number += 1
    try:
        folder.rename(target)
    except FileNotFoundError:  # another node that was started with --fresh was quicker
        return None
    except OSError as error:
        raise RunFolderError(
            f"cannot be moved to {target} ({error.strerror})",
            where=str(folder),
            remedy="move it yourself, or choose another folder",
        ) from None
    return target


def describe(
    folder: Path, loaded: Loaded, machine: Machine, dataset: Path, dataset_version: str
) -> None:
    """Write the three files. Later starts replace them: the journal keeps what was before.

    Raises RunFolderError when the folder cannot be made or written, and StoreError for a bucket's
    address that may hold a secret: the files would keep it.
    """
    check(loaded.config.checkpoint.bucket)
    resolved = loaded.to_json() | {
        "format": 1,
        "config_hash": config_hash(loaded.config),
        "dataset": {"folder": str(dataset.resolve()), "version": dataset_version},
    }
    files = {
        "run.yaml": loaded.text,
        "environment.json": _json(environment(machine)),
        RESOLVED: _json(resolved),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            _replace(folder / name, text)
    except (FileExistsError, NotADirectoryError) as error:
        raise RunFolderError(f"{error.filename} is a file, not a folder", where=str(folder),
                             remedy="choose another with folder=...") from None  # fmt: skip
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpaceError("the disk is full", where=str(folder),
                                  remedy="free some space and run the same command again",
                                  ) from None  # fmt: skip
        raise RunFolderError(
            f"the run folder cannot be written ({error.strerror})",
            where=str(folder),
            remedy="choose another with folder=..., or change its permissions",
        ) from None


def undescribe(folder: Path) -> None:
    """Take back what `describe` wrote into a folder in which nothing else has happened."""
    for name in (RESOLVED, *FIRST):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all; a full disk gives back what was begun."""
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        temporary.write_text(text, "utf-8")
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def environment(machine: Machine) -> dict[str, Any]:
    """Versions, git state, hardware: enough to tell later what this was."""
    return {
        "time": time.time(),
        "command": sys.argv,
        "folder": os.getcwd(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "git": {
            "holdfast": git_state(Path(__file__).parent),
            "here": git_state(Path.cwd()),
        },
        "hardware": machine.to_json(),
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit of the work tree around `folder` and whether it has changes; None outside one."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.strip(), "changed": bool(changes.strip())}


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments],
        capture_output=True, text=True, timeout=10, check=True,
    ).stdout  # fmt: skip


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n"

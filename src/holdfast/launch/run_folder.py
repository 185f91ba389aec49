"""The files that `train` writes into a run folder before a run starts, and its checks of the
folder.

run.yaml           the run file as it was read
resolved.json      every value, its origin, the overrides, the dataset
environment.json   versions, git state, hardware
"""

from __future__ import annotations

import errno
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from holdfast.config.identity import (
    config_differences,
    config_hash,
    is_place,
    refuse_other_run,
)
from holdfast.config.load import LoadedConfig
from holdfast.data.dataset import Dataset
from holdfast.elastic.protocol.generation_record import record_of
from holdfast.elastic.run_result import single_node_run_error
from holdfast.errors import CorruptError, OutOfSpaceError, RunFolderError
from holdfast.launch.runs import (
    LOCAL_ANSWER_TIMEOUT_S,
    REMOTE_ANSWER_TIMEOUT_S,
    RESOLVED_FILE,
    is_on_this_machine,
    probe_term_holder,
    probe_trainer,
    read_resolved,
    read_secrets,
)
from holdfast.plan.hardware import HardwareInfo
from holdfast.wire.secret import SECRET_FILE_VARIABLE, Secret
from holdfast.wire.store.location import check_location
from holdfast.wire.store.run_store import FolderStore, MissingKeyError
from holdfast.wire.term import GENERATIONS_PREFIX, TERMS_PREFIX, newest_generation, newest_term

FIRST_FILES = frozenset({"run.yaml", "environment.json"})
"""What a start that was cut short may leave before `resolved.json` makes it a run folder."""

REPORTED_PACKAGES = (
    "holdfast",
    "torch",
    "numpy",
    "pydantic",
    "tokenizers",
    "safetensors",
    "xxhash",
    "httptools",
    "psutil",
    "rich",
    "typer",
)


MAX_PROBED_NODES = 64
"""Nodes of a run that are asked whether they are still there: if it is alive, so is one of them."""


def refuse_in_use(folder: Path) -> None:
    """Raises RunFolderError when a trainer of this run folder answers, also one with another
    secret. Asked are the holder of the newest term and a node of the newest generation, which may
    be about to open the next. (The term that a trainer opens decides; this check comes before
    anything in the folder is touched.)"""
    if not folder.is_dir():
        return  # what else lies there is `describe`'s to refuse
    before, store = identity(folder), FolderStore(folder)
    number, holder = newest_term(store)
    secrets = read_secrets(folder)  # after the term: a trainer makes it before
    if holder is None:
        return
    who = _holder_label(holder)
    there = probe_term_holder(holder, secrets)
    if there is False:
        there, node = _probe_newest_nodes(store, secrets)
        who = f"node {node} is at work"
    if there is False or identity(folder) != before:  # another node has begun again: another run
        return
    if there is None:
        raise _other_secret_error(folder, number, who)
    raise RunFolderError(
        f"another trainer uses this run folder: {who}",
        where=str(folder),
        remedy="stop it, or choose another with folder=...",
    )


def refuse_alone(folder: Path) -> None:
    """Raises RunFolderError if a trainer here takes in no other nodes, or has another secret than a
    node started here. Such a node would take the refusal for silence, and open the next term."""
    number, holder = newest_term(FolderStore(folder))
    if holder is None:
        return
    alone = bool(holder.get("alone"))
    deadline = (
        LOCAL_ANSWER_TIMEOUT_S if alone and is_on_this_machine(holder) else REMOTE_ANSWER_TIMEOUT_S
    )
    secrets = read_secrets(folder)
    there = probe_term_holder(holder, secrets[:1], deadline)
    if there is None and probe_term_holder(holder, secrets[1:], deadline):
        raise RunFolderError(
            f"{_holder_label(holder)} trains with the secret in this folder, not that of "
            f"{SECRET_FILE_VARIABLE}",
            where=str(folder),
            remedy=f"unset {SECRET_FILE_VARIABLE}",
        )
    if there is None:
        raise _other_secret_error(folder, number, _holder_label(holder))
    if there and alone:
        raise single_node_run_error(holder, str(folder))


def _holder_label(holder: dict[str, Any]) -> str:
    return f"process {holder.get('pid')} on {holder.get('node')}"


def _other_secret_error(folder: Path, term: int, who: str) -> RunFolderError:
    """A trainer listens where one of this run's did, but it may be another run's by now. Only the
    person can know; to close the term says so."""
    closed = folder / f"{TERMS_PREFIX}{term:010d}-closed.json"  # as Term.close makes it
    return RunFolderError(
        f"a trainer with another secret than is known here uses this run folder, it seems: {who}",
        where=str(folder),
        remedy=f"name the file of the run's secret in {SECRET_FILE_VARIABLE}, "
        f"or, where this run's trainers are surely gone and another run listens in their place, "
        f"say so with: touch {shlex.quote(str(closed))}",
    )


def _probe_newest_nodes(store: FolderStore, secrets: Sequence[Secret]) -> tuple[bool | None, str]:
    """Whether a node of the newest generation answers, as `answers`, and which."""
    newest = newest_generation(store)
    try:
        addresses = record_of(store, newest).addresses if newest else {}
    except (CorruptError, MissingKeyError):
        return False, ""
    names = list(addresses)[:MAX_PROBED_NODES]
    if not names:
        return False, ""

    def ask(name: str) -> bool | None:
        return probe_trainer(addresses[name], secrets, REMOTE_ANSWER_TIMEOUT_S)

    with ThreadPoolExecutor(len(names), "ask") as threads:
        found = {there: name for name, there in zip(names, threads.map(ask, names), strict=True)}
    best = next(there for there in (True, None, False) if there in found)
    return best, found[best]


def refuse_other(folder: Path, loaded: LoadedConfig, dataset_version: str) -> None:
    """Raises RunFolderError when the folder belongs to a run that computes something else, or is
    a folder with other things in it."""
    stored = read_resolved(folder) or _read_just_begun(folder)
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


def dataset_version_in(folder: Path, dataset: Dataset) -> str:
    """The name by which the run in `folder` knows a dataset. It may be the one that the dataset had
    while the paths of its sources belonged to it."""
    stored = read_resolved(folder)
    known = str((stored or {}).get("dataset", {}).get("version", ""))
    return known if dataset.is_version(known) else dataset.version


def with_stored_places(folder: Path, loaded: LoadedConfig) -> LoadedConfig:
    """The configuration with the run's own spelling of the paths of its data, which is a part of
    the run's identity. `refuse_other` has compared what lies there."""
    stored = read_resolved(folder)
    if stored is None:
        return loaded
    found = config_differences(stored["config"], loaded.config)
    values = {d.key: d.there for d in found if is_place(d.key)}
    return loaded.with_planned(values, "the run folder's") if values else loaded


def refuse_old_base(loaded: LoadedConfig) -> None:
    """Raises RunFolderError for a relative path that led to a run or a dataset in older versions,
    which began at the current folder. From the run file it leads to nothing."""
    config = loaded.config
    for key, path, mark in (
        ("folder", config.run_folder, RESOLVED_FILE),
        ("data.folder", config.data.folder, "manifest.json"),
    ):
        if not loaded.base or os.path.isabs(path) or loaded.origins[key].kind == "command line":
            continue
        before = os.path.relpath(path, loaded.base)
        if os.path.exists(os.path.join(before, mark)) and not os.path.exists(
            os.path.join(path, mark)
        ):
            raise RunFolderError(
                f"{key} starts at the run file's folder, so it is {path}, which is empty; "
                f"{before} in the current folder is not",
                where=loaded.where(key),
                remedy=f"add {key}={before}, or move that folder",
            )


def refuse_foreign(folder: Path) -> None:
    """Raises RunFolderError for a folder with things in it that no `train` put there."""
    found: list[str] = []
    with suppress(FileNotFoundError):  # another node may move it just now
        found = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    foreign = [name for name in found if name not in FIRST_FILES and not name.startswith(".tmp-")]
    if foreign and not (folder / RESOLVED_FILE).exists():  # another node may have begun just now
        raise RunFolderError(
            f"this folder is not a run folder and has things in it ({', '.join(foreign[:3])})",
            where=str(folder),
            remedy="choose another with folder=..., or empty it",
        )


def _read_just_begun(folder: Path) -> dict[str, Any] | None:
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


def is_begun_by_other(
    folder: Path, before: tuple[int, int] | None, loaded: LoadedConfig, dataset_version: str
) -> bool:
    """Return True if another node that was started with --fresh has begun this folder. Then it is
    another folder than lay there `before`, when this command began, or one of this run without a
    term."""
    if identity(folder) != before:
        return True
    try:
        refuse_other(folder, loaded, dataset_version)
    except RunFolderError:
        return False
    store = FolderStore(folder)
    return not any(store.list(prefix) for prefix in (TERMS_PREFIX, GENERATIONS_PREFIX, "commits/"))


def set_aside(folder: Path, before: tuple[int, int] | None) -> Path | None:
    """Move the run folder that lay there `before` to `<folder>.old-<n>`; None when there was none,
    or another node that was started with --fresh was quicker.

    Raises RunFolderError for a folder in use, or one that no `train` made: it is not ours to move.
    """
    if before is None:
        return None
    refuse_in_use(folder)  # may take seconds
    try:
        refuse_foreign(folder)
    except RunFolderError:
        if identity(folder) == before:
            raise
    number = 1
    while True:
        target = folder.with_name(f"{folder.name}.old-{number}")
        if target.exists():
            number += 1
            continue
        # Only now: who moves it from here on takes the same name, and the rename below then fails.
        if identity(folder) != before:
            return None
        try:
            folder.rename(target)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                continue
            raise RunFolderError(
                f"cannot be moved to {target} ({error.strerror})",
                where=str(folder),
                remedy="move it yourself, or choose another folder",
            ) from None
        return target


def write_description(
    folder: Path, loaded: LoadedConfig, machine: HardwareInfo, dataset: Path, dataset_version: str
) -> None:
    """Write the three files. Later starts replace them: the journal keeps what was before. If two
    begin the folder in the same moment, only files of the same run are replaced.

    Raises RunFolderError when the folder cannot be made or written, or was begun by another run
    just now. Raises StoreError for a bucket's address that may hold a secret: the files would keep
    it.
    """
    check_location(loaded.config.checkpoint.bucket)
    resolved = loaded.to_json() | {
        "format": 1,
        "config_hash": config_hash(loaded.config),
        "dataset": {"folder": str(dataset.resolve()), "version": dataset_version},
    }
    files = {
        "run.yaml": loaded.text,
        "environment.json": _json(describe_environment(machine)),
        RESOLVED_FILE: _json(resolved),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (begins := _create_once(folder / RESOLVED_FILE, files[RESOLVED_FILE])):
            refuse_other(folder, loaded, dataset_version)
        try:
            for name, text in files.items():
                _replace_file(folder / name, text)
        except OSError:
            if begins:
                (folder / RESOLVED_FILE).unlink(missing_ok=True)
            raise
    except (FileExistsError, NotADirectoryError) as error:
        raise RunFolderError(
            f"{error.filename} is a file, not a folder",
            where=str(folder),
            remedy="choose another with folder=...",
        ) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpaceError(
                "the disk is full",
                where=str(folder),
                remedy="free some space and run the same command again",
            ) from None
        raise RunFolderError(
            f"the run folder cannot be written ({error.strerror})",
            where=str(folder),
            remedy="choose another with folder=..., or change its permissions",
        ) from None


def remove_description(folder: Path) -> None:
    """Take back what `describe` wrote into a folder in which nothing else has happened."""
    for name in (RESOLVED_FILE, *FIRST_FILES):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def _create_once(path: Path, text: str) -> bool:
    """Write a file atomically if it does not exist yet; return False if it does."""
    if path.exists():
        return False
    temporary = _temporary(path)
    try:
        temporary.write_text(text, "utf-8")
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        with suppress(OSError):
            temporary.unlink()
    return True


def _temporary(path: Path) -> Path:
    return path.with_name(f".tmp-{path.name}-{os.getpid()}")


def _replace_file(path: Path, text: str) -> None:
    """Write a file atomically; on a full disk, remove the part that was written."""
    temporary = _temporary(path)
    try:
        temporary.write_text(text, "utf-8")
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def describe_environment(machine: HardwareInfo) -> dict[str, Any]:
    """Versions, git state, hardware: enough to tell later what this was."""
    return {
        "time": time.time(),
        "command": sys.argv,
        "folder": os.getcwd(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in REPORTED_PACKAGES},
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
        capture_output=True,
        text=True,
        timeout=10,
        check=True,
    ).stdout


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n"

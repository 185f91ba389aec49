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
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.config.loading.explain import format_value
from holdfast.config.loading.identity import (
    SCHEDULE_STEPS,
    config_differences,
    config_hash,
    earlier_hash,
    is_place,
    refuse_other_run,
    values_alike_on_all_nodes,
)
from holdfast.config.loading.load import LoadedConfig, PlannedValues
from holdfast.config.run import RunConfig
from holdfast.data.stream.dataset import Dataset
from holdfast.data.stream.dataset_location import resolve_place
from holdfast.elastic.run_result import single_node_run_error
from holdfast.errors import HoldfastError, OutOfSpaceError, RunFolderError
from holdfast.launch.node.addresses import is_loopback_elsewhere
from holdfast.launch.run.bucket_run import (
    begin_again_word,
    describe_in_bucket,
    refuse_foreign_bucket,
    refuse_fresh_in_bucket,
)
from holdfast.launch.run.holder import REMOTE_ANSWER_TIMEOUT_S, HolderWatch, ask_holder
from holdfast.launch.run.resume_checks import branch_command, refuse_cut
from holdfast.launch.run.runs import RESOLVED_FILE, read_resolved, read_secrets
from holdfast.launch.run.sealing import seal_folder
from holdfast.launch.start.facts import Facts
from holdfast.machine.hardware import HardwareInfo
from holdfast.wire.secret import SECRET_FILE_VARIABLE
from holdfast.wire.store.folder_seal import SEAL_FILE
from holdfast.wire.store.location import check_location, open_store
from holdfast.wire.store.publish import publish_file, replace_file, temporary_beside
from holdfast.wire.store.run_location import (
    bucket_of_run,
    location_of_run,
    read_run_file,
    replace_run_file,
    store_of_run,
    where_of_run,
)
from holdfast.wire.store.run_store import SIMULATED_KEY, MissingKeyError
from holdfast.wire.term import GENERATIONS_PREFIX, TERMS_PREFIX, HolderReply, newest_term

DESCRIPTION_TEXTS = ("run.yaml", "environment.json")
FIRST_FILES = frozenset({*DESCRIPTION_TEXTS, SEAL_FILE})
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


def refuse_in_use(folder: Path, watch: HolderWatch | None = None) -> None:
    """Raises RunFolderError while a trainer of this run folder lives. (The term that a trainer
    opens decides; this check comes before anything in the folder is touched.)

    watch: what is known of the holder already."""
    if not folder.is_dir():
        return  # what else lies there is `refuse_foreign`'s to refuse
    before, watch = run_id(folder), watch or HolderWatch(folder)
    if not watch.wait_for_verdict() or run_id(folder) != before:
        return  # no holder lives, or another node has begun again: another run
    raise RunFolderError(
        f"another trainer uses this run folder: {watch.describe_holder()}",
        where=where_of_run(folder),
        remedy="stop it, or choose another with folder=...",
    )


def refuse_alone(folder: Path, watch: HolderWatch | None = None) -> None:
    """Raises RunFolderError if a node from here cannot join the trainer that lives.

    The trainer takes in no other nodes, cannot be reached from this host, or has another secret.
    The node would find silence, and open the next term."""
    _, holder = newest_term(store_of_run(folder))
    if holder is None:
        return
    watch = watch or HolderWatch(folder)
    if holder.get("alone"):
        if watch.wait_for_verdict():
            raise single_node_run_error(holder, where_of_run(folder))
        return
    if is_loopback_elsewhere(holder):  # at our own loopback address is no leader
        if watch.wait_for_verdict():
            raise RunFolderError(
                f"{watch.describe_holder()} leads the run and listens on {holder.get('address')}, "
                "which only its own machine reaches",
                where=where_of_run(folder),
                remedy="start it without cluster.interface, or with an address of its machine",
            )
        return
    address, known = str(holder.get("address", "")), read_secrets(folder)
    if ask_holder(address, known[:1], REMOTE_ANSWER_TIMEOUT_S) is not HolderReply.UNSIGNED:
        return  # it admits this node, or this node finds out whether it is dead
    if not watch.wait_for_verdict():
        return  # another process has its port by now
    in_folder = ask_holder(address, known[1:], REMOTE_ANSWER_TIMEOUT_S) is HolderReply.LIVES
    raise RunFolderError(
        f"another secret than is known here is the run's: {watch.describe_holder()}",
        where=where_of_run(folder),
        remedy=f"unset {SECRET_FILE_VARIABLE}: the secret in this folder is right"
        if in_folder
        else f"name the file of the run's secret in {SECRET_FILE_VARIABLE}",
    )


def refuse_other(folder: Path, loaded: LoadedConfig, dataset_version: str) -> None:
    """Raises RunFolderError when the folder belongs to a run that computes something else, or is
    a folder with other things in it."""
    stored = read_resolved(folder) or _read_just_begun(folder)
    if stored is None:
        return
    if SIMULATED_KEY in stored:
        raise RunFolderError(
            "this is the folder of a simulated run, which cannot be continued",
            where=where_of_run(folder),
            remedy=f"choose another with folder=..., or {begin_again_word(folder)}",
        )
    differing = [
        d for d in config_differences(stored["config"], loaded.config) if not is_place(d.key)
    ]
    if [d.key for d in differing] == [SCHEDULE_STEPS]:
        refuse_cut(folder, loaded.config.train.steps)  # no other length of the schedule helps
    command, note = branch_command(folder, stored["config"], loaded.config)
    refuse_other_run(stored["config"], loaded.config, where_of_run(folder), command, note)
    before = stored.get("dataset", {}).get("version", dataset_version)
    if before != dataset_version:
        raise RunFolderError(
            f"the run was trained on dataset {before}, and data.folder holds {dataset_version}",
            where=where_of_run(folder),
            remedy=f"name the folder of that dataset, or {begin_again_word(folder)}",
        )


def dataset_version_in(folder: Path, dataset: Dataset) -> str:
    """The name by which the run in `folder` knows a dataset. It may be the one that the dataset had
    while the paths of its sources belonged to it."""
    stored = read_resolved(folder)
    known = str((stored or {}).get("dataset", {}).get("version", ""))
    return known if dataset.is_version(known) else dataset.version


def by_stored_places(loaded: LoadedConfig, facts: Facts) -> PlannedValues:
    """Return the stored run's spelling of the paths of its data, which is a part of the run's
    identity. `refuse_other` has compared what lies there."""
    if facts.stored is None:
        return {}
    differences = config_differences(facts.stored_config, loaded.config)
    return {d.key: (d.there, "the run folder's") for d in differences if is_place(d.key)}


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
    if bucket_of_run(folder):
        refuse_foreign_bucket(folder)
        return
    found: list[str] = []
    with suppress(FileNotFoundError):  # another node may move it just now
        found = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    foreign = [name for name in found if name not in FIRST_FILES and not name.startswith(".tmp-")]
    if foreign and not (folder / RESOLVED_FILE).exists():  # another node may have begun just now
        raise RunFolderError(
            f"this folder is not a run folder and has things in it ({', '.join(foreign[:3])})",
            where=where_of_run(folder),
            remedy="choose another with folder=..., or empty it",
        )


def _read_just_begun(folder: Path) -> dict[str, Any] | None:
    """What another node has written since it was not there."""
    refuse_foreign(folder)
    return read_resolved(folder)


def run_id(folder: Path) -> str | None:
    """Which run lies at that path: what the start that began it drew. None for none, "" for one of
    an older version, or one whose description cannot be read."""
    try:
        stored = read_resolved(folder)
    except RunFolderError:
        return ""
    return None if stored is None else str(stored.get("run_id", ""))


def run_hash(folder: Path, config: RunConfig) -> str:
    """The identity of the run in `folder`: what its first start computed, also if a later one
    changed a key in place. For a new folder, that of the configuration."""
    stored = read_resolved(folder)
    return str((stored or {}).get("config_hash") or _hash_in_bucket(config) or config_hash(config))


def _hash_in_bucket(config: RunConfig) -> str:
    """The identity that an older version gave this run, if its bucket's newest checkpoint has it.
    A bucket that does not answer is a refusal of the start, which asks it again."""
    earlier = earlier_hash(config)
    if not config.checkpoint.bucket or earlier is None:
        return ""
    with suppress(HoldfastError, MissingKeyError):
        bucket = open_store(config.checkpoint.bucket)
        for key in list_commits(bucket)[:1]:
            if Checkpoint.open(bucket, key).commit.config_hash == earlier:
                return earlier
    return ""


def is_begun_by_other(
    folder: Path, before: str | None, loaded: LoadedConfig, dataset_version: str
) -> bool:
    """Return True if another node that was started with --fresh has begun this folder. Then it
    holds another run than `before`, when this command began, or one like this without a term."""
    if run_id(folder) != before:
        return True
    try:
        refuse_other(folder, loaded, dataset_version)
    except RunFolderError:
        return False
    store = store_of_run(folder)
    return not any(store.list(prefix) for prefix in (TERMS_PREFIX, GENERATIONS_PREFIX, "commits/"))


def set_aside(folder: Path, before: str | None, watch: HolderWatch | None = None) -> Path | None:
    """Move the run `before` to `<folder>.old-<n>`; None when there was none, or another node that
    was started with --fresh was quicker.

    Raises RunFolderError for a folder in use, or one that no `train` made: it is not ours to move.
    """
    if before is None:
        return None
    refuse_fresh_in_bucket(folder)
    refuse_in_use(folder, watch)  # may take seconds
    number = 1
    while True:
        target = folder.with_name(f"{folder.name}.old-{number}")
        if target.exists():
            number += 1
            continue
        # Only now: who moves it from here on takes the same name, and the rename below then fails.
        if run_id(folder) != before:
            return None
        try:
            folder.rename(target)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                continue
            if error.errno == errno.EBUSY:
                raise RunFolderError(
                    "the run folder is a mount point, which cannot be moved aside",
                    where=where_of_run(folder),
                    remedy=f"start the new run in it with folder={folder / 'new'}, or empty it",
                ) from None
            raise RunFolderError(
                f"cannot be moved to {target} ({error.strerror})",
                where=where_of_run(folder),
                remedy="move it yourself, or choose another folder",
            ) from None
        return target


def write_description(
    folder: Path,
    loaded: LoadedConfig,
    machine: HardwareInfo,
    dataset: str | Path,
    dataset_version: str,
) -> bool:
    """Write the three files; return True if they begin the run. Later starts replace them: the
    journal keeps what was before. Of several that begin the folder in one moment, the one that
    creates `resolved.json` with its run id begins the run. The rest join it, or are refused.

    Raises RunFolderError when the folder cannot be made or written, or was begun by another run
    just now. Raises StoreError for a bucket's address that may hold a secret: the files would keep
    it.
    """
    check_location(loaded.config.checkpoint.bucket)
    check_location(loaded.config.data.folder)
    resolved = loaded.to_json() | {
        "format": 1,
        "config_hash": run_hash(folder, loaded.config),
        "dataset": {"folder": resolve_place(dataset), "version": dataset_version},
        "run_id": secrets.token_hex(16),
    }
    files = {
        "run.yaml": loaded.text,
        "environment.json": _json(describe_environment(machine)),
        RESOLVED_FILE: _json(resolved),
    }

    def when_begun() -> str:
        refuse_other(folder, loaded, dataset_version)
        return _json(resolved | {"run_id": run_id(folder) or ""})

    if bucket_of_run(folder):
        return describe_in_bucket(folder, files, RESOLVED_FILE, when_begun)
    return _describe_in_folder(folder, loaded.config, files, when_begun)


def _describe_in_folder(
    folder: Path, config: RunConfig, files: dict[str, str], when_begun: Callable[[], str]
) -> bool:
    """As `describe_in_bucket`."""
    seal_folder(folder, config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (begins := _create_once(folder / RESOLVED_FILE, files[RESOLVED_FILE])):
            files[RESOLVED_FILE] = when_begun()
        try:
            for name, text in files.items():
                replace_file(folder / name, text)
        except OSError:
            if begins:
                (folder / RESOLVED_FILE).unlink(missing_ok=True)
            raise
        return begins
    except (FileExistsError, NotADirectoryError) as error:
        path = Path(str(error.filename))
        in_the_way = [p for p in (path, *path.parents) if p.exists() and not p.is_dir()]
        raise RunFolderError(
            f"{(in_the_way or [path])[0]} is a file, not a folder",
            where=where_of_run(folder),
            remedy="choose another with folder=...",
        ) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpaceError(
                "the disk is full",
                where=where_of_run(folder),
                remedy="free some space and run the same command again",
            ) from None
        raise RunFolderError(
            f"the run folder cannot be written ({error.strerror})",
            where=where_of_run(folder),
            remedy="choose another with folder=..., or change its permissions",
        ) from None


@contextmanager
def description_put_back(folder: Path) -> Iterator[None]:
    """Put the files of a run's description back if the body raises a HoldfastError. So no
    command shows later what was refused."""
    before = {name: read_run_file(folder, name) for name in (RESOLVED_FILE, *DESCRIPTION_TEXTS)}
    try:
        yield
    except HoldfastError:
        for name, text in before.items():
            if text is None:
                continue
            if bucket_of_run(folder):
                replace_run_file(store_of_run(folder), name, text)
            else:
                replace_file(folder / name, text)
        raise


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
    temporary = temporary_beside(path)
    try:
        temporary.write_text(text, "utf-8")
        publish_file(temporary, path)
    except FileExistsError:
        return False
    finally:
        with suppress(OSError):
            temporary.unlink()
    return True


def describe_environment(machine: HardwareInfo) -> dict[str, Any]:
    """Versions, git state, hardware: enough to tell later what this was."""
    return {
        "time": time.time(),
        "command": sys.argv,
        "folder": os.getcwd(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in REPORTED_PACKAGES},
        "git": {"holdfast": git_state(Path(__file__).parent), "here": git_state(Path.cwd())},
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


def refuse_unlike_node(folder: Path, loaded: LoadedConfig, watch: HolderWatch) -> None:
    """Compare the keys that have to be alike on all nodes with those of the nodes at work.

    Raises RunFolderError, with both values, if one differs."""
    stored = read_resolved(folder)
    if stored is None or watch.look() is not True:
        return
    there = values_alike_on_all_nodes(stored["config"])
    here = values_alike_on_all_nodes(loaded.config.model_dump(mode="json"))
    for key in sorted(there.keys() & here.keys()):
        if there[key] != here[key]:
            raise RunFolderError(
                f"{key} is {format_value(here[key])} here and {format_value(there[key])} on the "
                "nodes at work; it has to be alike on all nodes of a run",
                where=where_of_run(folder),
                remedy=f"use {key}={format_value(there[key])}, or holdfast join "
                f"{location_of_run(folder)}",
            )

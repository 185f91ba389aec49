"""A run, as other commands than `train` find it: its folder, store, configuration, dataset."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from holdfast.config.loading.load import load_config
from holdfast.config.loading.paths import expand_address
from holdfast.config.run import RunConfig
from holdfast.config.sections.run_place import is_bucket
from holdfast.core.json_parsing import parse_json
from holdfast.errors import START_OVER, HoldfastError, ModelFolderError, RunFolderError
from holdfast.wire.secret import Secret, given_secret_file, read_secret, secret_exists
from holdfast.wire.store.run_location import (
    location_of_run,
    make_local_folder,
    read_run_file,
    store_of_run,
)
from holdfast.wire.store.run_store import SIMULATED_KEY, RunStore
from holdfast.wire.term import newest_term, secret_of

RESOLVED_FILE = "resolved.json"
"""A key of `resolved.json` that only a simulated run has: the policy, in words."""
IMPORTED_FOLDER = "imported"
"""Settings of the folder whose weights the run began with; an export gives them back."""


@dataclass(frozen=True)
class Run:
    """A run folder that was trained in, and what it says about itself."""

    folder: Path
    store: RunStore
    config: RunConfig
    resolved: dict[str, Any]

    def __reduce__(self) -> tuple[Callable[..., Run], tuple[Any, ...]]:
        """Another process opens the run store again."""
        return _run_in, (self.folder, self.config, self.resolved)

    @property
    def place(self) -> str:
        """The run's folder, or its bucket's address, for messages and commands."""
        return location_of_run(self.folder)

    @property
    def is_simulated(self) -> bool:
        """`holdfast simulate --out` wrote it: nothing was trained, and no dataset was used."""
        return SIMULATED_KEY in self.resolved

    @property
    def dataset_location(self) -> str:
        """The dataset's folder, or its address, when the run was last started."""
        return str(self.resolved.get("dataset", {}).get("folder") or self.config.data.folder)

    @property
    def dataset_files(self) -> Path:
        """A folder with the dataset's manifest, tokenizer and template, if they exist. Raises
        UserError for an address that fails."""
        from holdfast.data.stream.dataset_location import local_files

        if tokenizer := self.config.rollout.places.get("tokenizer"):
            return Path(tokenizer).parent  # of a run that generates its data
        return local_files(self.dataset_location, self.config.data)

    @property
    def dataset_version(self) -> str:
        """Of the dataset that the run is trained on."""
        return str(self.resolved.get("dataset", {}).get("version", ""))


def named_path(argument: str | Path) -> Path:
    """Return the path that an argument names: a run file, a run folder, or the local folder of a
    run at a bucket's address. Raises UserError."""
    text = str(argument)
    return make_local_folder(expand_address(text)) if "://" in text else Path(text)


def run_folder_of(config: RunConfig) -> Path:
    """Return the run's folder on this node; that of a run in a bucket is made if it is missing."""
    place = config.run_place
    return make_local_folder(place) if is_bucket(place) else Path(place)


def folder_of_argument(argument: Path) -> Path:
    """Return the run folder that `argument` names: itself, or that of the run file it is. Raises
    ConfigError for a run file that is wrong."""
    if not argument.is_file():
        return argument
    try:
        return run_folder_of(load_config(argument).config)
    except ModelFolderError as error:
        raise ModelFolderError(
            f"{argument} reads this folder, and {error.message}",
            where=error.where,
            remedy="name the run folder in the place of the run file",
        ) from None


def folder_with_job(argument: Path) -> Path:
    """Return the run folder that `argument` names. If it has no job of 'holdfast launch', the run
    store is asked whether there is a run. Raises RunFolderError if there is none."""
    from holdfast.launch.owners.owner import JOB_FILE

    folder = folder_of_argument(argument)
    return folder if (folder / JOB_FILE).exists() else open_run(argument).folder


def open_run(argument: Path) -> Run:
    """The run that `argument` names: its folder, or the run file that it was started with.

    Raises RunFolderError where there is no run, ConfigError for a run file that is wrong.
    """
    folder = folder_of_argument(argument)
    resolved = read_resolved(folder)
    if resolved is None:
        raise RunFolderError(
            "there is no run here",
            where=location_of_run(folder),
            remedy=f"train it first: holdfast train {shlex.quote(str(argument))}"
            if argument.is_file()
            else "name a run folder or bucket, or a run file that was trained",
        )
    known = drop_unknown_keys(resolved["config"])
    try:
        config = RunConfig.model_validate(known)
    except ValidationError:
        raise _foreign_file_error(folder / RESOLVED_FILE) from None
    return Run(folder, store_of_run(folder), config, resolved | {"config": known})


def _run_in(folder: Path, config: RunConfig, resolved: dict[str, Any]) -> Run:
    return Run(folder, store_of_run(folder), config, resolved)


def with_base(run: Run, base: Path | None) -> Run:
    """The run with its frozen weights in another folder, if one is named. Raises RunFolderError
    for a run that has none."""
    if base is None:
        return run
    lora = run.config.lora
    if not lora.rank or run.config.task.name:
        raise RunFolderError(
            "this run has no folder of frozen weights", where=run.place, remedy="leave out --base"
        )
    moved = lora.model_copy(update={"base": os.path.abspath(base)})
    return replace(run, config=run.config.model_copy(update={"lora": moved}))


def read_resolved(folder: Path) -> dict[str, Any] | None:
    """The folder's `resolved.json`, or None where there is none. Raises RunFolderError when it
    is not what `train` wrote."""
    path = folder / RESOLVED_FILE
    try:
        text = read_run_file(folder, RESOLVED_FILE)
        if text is None:
            return None
        value = parse_json(text)
    except (ValueError, IsADirectoryError):
        raise _foreign_file_error(path) from None
    except OSError as error:  # a link to itself, a folder or a disk that refuses
        raise RunFolderError(
            f"this cannot be read ({error.strerror})",
            where=str(path),
            remedy="see what it is with: ls -l, then restore it from a backup",
        ) from None
    if isinstance(value, dict):
        sections = value.get("config"), value.get("dataset", {})
        if all(isinstance(section, dict) for section in sections):
            return value
    raise _foreign_file_error(path)


def _foreign_file_error(path: Path) -> RunFolderError:
    return RunFolderError(
        "this is not what 'holdfast train' wrote",
        where=str(path),
        remedy=f"restore it from a backup, or {START_OVER}",
    )


def read_secrets(folder: Path) -> tuple[Secret, ...]:
    """Return the possible secrets of the run. First comes the one that a trainer started here would
    use (the environment's, or the folder's), with TLS if the run's newest term speaks it. None is
    made. Raises RunFolderError for one that other users may read, and StoreError if the run store
    is out of reach."""
    found = read_secret_files(folder)
    holder = newest_term(store_of_run(folder))[1] if found else None
    return tuple(dict.fromkeys(secret_of(holder, secret) for secret in found))


def read_secret_files(folder: Path) -> list[Secret]:
    """Return the secrets of this machine's files, without TLS, in the order of `read_secrets`. The
    run store is not asked: if it is out of reach, no secret is to blame. Raises RunFolderError."""
    named, own = given_secret_file(os.environ), folder / "secret"
    found = [read_secret(named, is_given=True)] if named else []
    if secret_exists(own):
        try:
            found.append(read_secret(own))
        except RunFolderError:
            if not named:  # else it is not the one that is used here
                raise
    return found


def drop_unknown_keys(stored: dict[str, Any]) -> dict[str, Any]:
    """A stored configuration without the keys that this version does not know."""
    from holdfast.config.loading.fields import field_at, leaves

    strange = [key for key, _ in leaves(stored) if field_at(key.split(".")) is None]
    kept: dict[str, Any] = json.loads(json.dumps(stored))
    for key in strange:
        holder: Any = kept
        *parents, last = key.split(".")
        for part in parents:
            holder = holder[int(part)] if isinstance(holder, list) else holder.get(part, {})
        if isinstance(holder, dict):
            holder.pop(last, None)
    return kept


def read_environment(folder: Path) -> dict[str, Any]:
    """What `environment.json` says; empty where it is missing or unreadable."""
    try:
        value = parse_json(read_run_file(folder, "environment.json") or "{}")
    except (HoldfastError, OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}

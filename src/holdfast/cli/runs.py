"""A run, as commands other than `train` find it: its folder, store, configuration, dataset."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from holdfast.config.load import load
from holdfast.config.run import RunConfig
from holdfast.errors import RunFolderError
from holdfast.spec.parsing import parsed
from holdfast.wire.runstore import FolderStore
from holdfast.wire.secret import VARIABLE, Secret, open_secret
from holdfast.wire.term import asks, newest_term

RESOLVED = "resolved.json"
FAR_SECONDS = 3.0
"""How long a trainer on another machine is waited for: its address may mean nothing here."""


@dataclass(frozen=True)
class Run:
    """A run folder that was trained in, and what it says about itself."""

    folder: Path
    store: FolderStore
    config: RunConfig
    resolved: dict[str, Any]

    @property
    def dataset_folder(self) -> Path:
        """Where the dataset lay when the run was last started."""
        return Path(self.resolved.get("dataset", {}).get("folder") or self.config.data.folder)

    @property
    def dataset_version(self) -> str:
        """Of the dataset that the run is trained on."""
        return str(self.resolved.get("dataset", {}).get("version", ""))


def open_run(argument: Path) -> Run:
    """The run that `argument` names: its folder, or the run file that it was started with.

    Raises RunFolderError where there is no run, ConfigError for a run file that is wrong.
    """
    folder = argument
    if argument.is_file():
        folder = Path(load(argument).config.run_folder)
    resolved = read_resolved(folder)
    if resolved is None:
        raise RunFolderError(
            "there is no run here",
            where=str(folder),
            remedy="name a run folder, or a run file that was trained: holdfast train RUN.yaml",
        )
    known = known_only(resolved["config"])
    try:
        config = RunConfig.model_validate(known)
    except ValidationError:
        raise _not_ours(folder / RESOLVED) from None
    return Run(folder, FolderStore(folder), config, resolved | {"config": known})


def read_resolved(folder: Path) -> dict[str, Any] | None:
    """The folder's `resolved.json`, or None where there is none. Raises RunFolderError when it
    is not what `train` wrote."""
    path = folder / RESOLVED
    try:
        value = parsed(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, IsADirectoryError):
        raise _not_ours(path) from None
    except OSError as error:  # a link to itself, a folder or a disk that refuses
        raise RunFolderError(
            f"this cannot be read ({error.strerror})",
            where=str(path),
            remedy="see what it is with: ls -l, then restore it from a backup",
        ) from None
    if isinstance(value, dict) and _has_sections(value):
        return value
    raise _not_ours(path)


def _has_sections(value: dict[str, Any]) -> bool:
    return isinstance(value.get("config"), dict) and isinstance(value.get("dataset", {}), dict)


def _not_ours(path: Path) -> RunFolderError:
    return RunFolderError(
        "this is not what 'holdfast train' wrote",
        where=str(path),
        remedy="restore it from a backup, or start over with --fresh",
    )


def secret_of(folder: Path) -> Secret | None:
    """The run's secret, which lies in its folder or where the environment says; None, and none is
    made, where there is none. Raises RunFolderError for one that others may read."""
    there = bool(os.environ.get(VARIABLE)) or (folder / "secret").exists()
    return open_secret(folder) if there else None


def trainer_answers(folder: Path) -> bool | None:
    """Whether a trainer is at work in a run folder; None where that cannot be told from here."""
    _, holder = newest_term(FolderStore(folder))
    if holder is None:
        return False
    try:
        secret = secret_of(folder)
    except RunFolderError:
        return None
    here = holder.get("machine", holder.get("node")) == platform.node()
    if secret is None:
        return False if here else None
    if asks(secret, *(() if here else (FAR_SECONDS,)))(str(holder.get("address", ""))):
        return True
    return False if here else None  # its address may mean something else on this machine


def known_only(stored: dict[str, Any]) -> dict[str, Any]:
    """A stored configuration without the keys that this version does not know."""
    from holdfast.config.fields import field_at, leaves

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
        value = parsed((folder / "environment.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}

"""A run, as commands other than `train` find it: its folder, store, configuration, dataset."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.config.load import load
from holdfast.config.run import RunConfig
from holdfast.errors import RunFolderError
from holdfast.wire.runstore import FolderStore

RESOLVED = "resolved.json"


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
    config = RunConfig.model_validate(known_only(resolved["config"]))
    return Run(folder, FolderStore(folder), config, resolved)


def read_resolved(folder: Path) -> dict[str, Any] | None:
    """The folder's `resolved.json`, or None where there is none. Raises RunFolderError when it
    is not what `train` wrote."""
    path = folder / RESOLVED
    try:
        value = json.loads(path.read_text("utf-8"))
        if isinstance(value, dict) and isinstance(value.get("config"), dict):
            return value
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        pass
    raise RunFolderError("this is not what 'holdfast train' wrote", where=str(path),
                         remedy="restore it from a backup, or start over with --fresh")  # fmt: skip


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
        value = json.loads((folder / "environment.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}

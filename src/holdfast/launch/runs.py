"""A run, as other commands than `train` find it: its folder, store, configuration, dataset."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from holdfast.config.load import load_config
from holdfast.config.run import RunConfig
from holdfast.core.json_parsing import parse_json
from holdfast.errors import RunFolderError
from holdfast.wire.http.sync_connection import SyncConnection
from holdfast.wire.secret import SECRET_FILE_VARIABLE, Secret, read_secret
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import TERM_PATH, newest_term, probe_holder

RESOLVED_FILE = "resolved.json"
LOCAL_ANSWER_TIMEOUT_S = 10.0
"""Seconds to wait for a trainer (`wire.term.holder_probe`): a slow one is not lost."""
_ONLY_HERE = ("127.", "localhost:", "[::1]:")
REMOTE_ANSWER_TIMEOUT_S = 3.0
"""Seconds to wait for a trainer on another machine: its address may mean nothing here."""


@dataclass(frozen=True)
class Run:
    """A run folder that was trained in, and what it says about itself."""

    folder: Path
    store: FolderStore
    config: RunConfig
    resolved: dict[str, Any]

    @property
    def dataset_folder(self) -> Path:
        """Path of the dataset when the run was last started."""
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
        folder = Path(load_config(argument).config.run_folder)
    resolved = read_resolved(folder)
    if resolved is None:
        raise RunFolderError(
            "there is no run here",
            where=str(folder),
            remedy="name a run folder, or a run file that was trained: holdfast train RUN.yaml",
        )
    known = drop_unknown_keys(resolved["config"])
    try:
        config = RunConfig.model_validate(known)
    except ValidationError:
        raise _foreign_file_error(folder / RESOLVED_FILE) from None
    return Run(folder, FolderStore(folder), config, resolved | {"config": known})


def read_resolved(folder: Path) -> dict[str, Any] | None:
    """The folder's `resolved.json`, or None where there is none. Raises RunFolderError when it
    is not what `train` wrote."""
    path = folder / RESOLVED_FILE
    try:
        value = parse_json(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, IsADirectoryError):
        raise _foreign_file_error(path) from None
    except OSError as error:  # a link to itself, a folder or a disk that refuses
        raise RunFolderError(
            f"this cannot be read ({error.strerror})",
            where=str(path),
            remedy="see what it is with: ls -l, then restore it from a backup",
        ) from None
    if isinstance(value, dict) and _has_sections(value):
        return value
    raise _foreign_file_error(path)


def _has_sections(value: dict[str, Any]) -> bool:
    return isinstance(value.get("config"), dict) and isinstance(value.get("dataset", {}), dict)


def _foreign_file_error(path: Path) -> RunFolderError:
    return RunFolderError(
        "this is not what 'holdfast train' wrote",
        where=str(path),
        remedy="restore it from a backup, or start over with --fresh",
    )


def read_secrets(folder: Path) -> tuple[Secret, ...]:
    """Return the possible secrets of the run. First comes the one that a trainer started here would
    use (the environment's, or the folder's). None is made. Raises RunFolderError for one that other
    users may read."""
    named, own = os.environ.get(SECRET_FILE_VARIABLE), folder / "secret"
    found = [read_secret(Path(named), is_given=True)] if named else []
    if own.exists():
        try:
            found.append(read_secret(own))
        except RunFolderError:
            if not named:  # else it is not the one that is used here
                raise
    return tuple(dict.fromkeys(found))


def probe_trainer(
    address: str, secrets: Sequence[Secret], deadline: float = LOCAL_ANSWER_TIMEOUT_S
) -> bool | None:
    """Return True if a trainer answers that knows one of these secrets. None for a trainer that
    knows none of them: its run is unknown."""
    for secret in secrets:
        if (there := probe_holder(address, secret, deadline)) is not None:
            return there
    return None if _demands_proof(address, deadline) else False


def probe_term_holder(
    holder: dict[str, Any], secrets: Sequence[Secret], deadline: float = LOCAL_ANSWER_TIMEOUT_S
) -> bool | None:
    """As `answers`, of who holds a term. A trainer with another secret at an address that only its
    own machine knows, which is not this one, is another run's."""
    address = str(holder.get("address", ""))
    there = probe_trainer(address, secrets, deadline)
    elsewhere = not is_on_this_machine(holder) and address.startswith(_ONLY_HERE)
    return False if there is None and elsewhere else there


def _demands_proof(address: str, deadline: float) -> bool:
    """Return True if an agent of any run listens there: it refuses a request without a proof. A
    stranger's process that has the port by now answers something else."""
    host, _, port = address.rpartition(":")
    try:
        link = SyncConnection(host.strip("[]"), int(port), deadline)
    except (OSError, ValueError):
        return False
    try:
        return link.request("POST", TERM_PATH, {}).status == 401
    except OSError:
        return False
    finally:
        link.close()


def probe_run(folder: Path) -> bool | None:
    """Return True if a trainer is at work in a run folder; None if that is unknown from here."""
    _, holder = newest_term(FolderStore(folder))
    if holder is None:
        return False
    here = is_on_this_machine(holder)
    try:
        secrets = read_secrets(folder)
    except RunFolderError:
        return None
    if not secrets and not here:
        return None
    there = probe_trainer(
        str(holder.get("address", "")),
        secrets,
        LOCAL_ANSWER_TIMEOUT_S if here else REMOTE_ANSWER_TIMEOUT_S,
    )
    return there if here or there else None  # its address may mean something else on this machine


def is_on_this_machine(holder: dict[str, Any]) -> bool:
    """Return True if a term's holder was started on this machine."""
    return bool(holder.get("machine", holder.get("node")) == platform.node())


def drop_unknown_keys(stored: dict[str, Any]) -> dict[str, Any]:
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
        value = parse_json((folder / "environment.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}

"""The run store of a run: the run folder itself, or the bucket that a file in the folder names.

A run in a bucket has a local folder on each node (`config/sections/run_place.py`). Its file
`store.json` names the bucket, so every process of the node opens the same store by the folder's
path alone.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from holdfast.config.sections.run_place import local_run_folder
from holdfast.core.json_parsing import parse_json
from holdfast.errors import RunFolderError
from holdfast.wire.store.location import check_location, open_store
from holdfast.wire.store.run_store import (
    MissingKeyError,
    ReplacingStore,
    RunStore,
    translate_os_error,
)

STORE_FILE = "store.json"


def store_of_run(folder: Path | str) -> RunStore:
    """Open the run store of the run with this folder; nothing is asked of it yet. Raises
    RunFolderError, also for sealed checkpoints without their key."""
    address = bucket_of_run(folder)
    return open_store(address or str(folder))


def location_of_run(folder: Path | str) -> str:
    """Return the place of the run store: a bucket's address, or the folder's path."""
    return bucket_of_run(folder) or str(folder)


def where_of_run(folder: Path | str) -> str:
    """Return the place of the run store for a message: without the options of an address."""
    return bucket_of_run(folder).partition("?")[0] or str(folder)


def bucket_of_run(folder: Path | str) -> str:
    """Return the address of the run's bucket; "" for a run in a folder. Raises RunFolderError for a
    file that does not name one."""
    path = Path(folder) / STORE_FILE
    try:
        value = parse_json(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except ValueError:
        value = None
    except OSError as error:
        raise translate_os_error(error, path) from error
    if isinstance(value, dict) and isinstance(value.get("location"), str):
        return str(value["location"])
    raise RunFolderError(
        "this file does not name a bucket",
        where=str(path),
        remedy="remove it; a command that gets the bucket's address writes it again",
    )


def make_local_folder(address: str) -> Path:
    """Return this node's folder for the run at a bucket's address, made if it is missing. Raises
    RunFolderError, and StoreError for an address that cannot be right."""
    check_location(address)
    folder = Path(local_run_folder(address))
    path = folder / STORE_FILE
    if path.exists() and bucket_of_run(folder) == address:
        return folder
    temporary = folder / f".tmp-{STORE_FILE}-{os.getpid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"location": address}) + "\n", "utf-8")
        temporary.replace(path)
    except OSError as error:
        raise translate_os_error(error, folder) from error
    return folder


def read_run_file(folder: Path, name: str) -> str | None:
    """Return the content of a file of the run's description, from the bucket if the run is in one.
    None if there is none. Raises OSError, UnicodeDecodeError, and what the run store raises."""
    if not bucket_of_run(folder):
        try:
            return (folder / name).read_text("utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None
    try:
        return store_of_run(folder).get(name).decode("utf-8")
    except MissingKeyError:
        return None


def replace_run_file(store: RunStore, name: str, text: str) -> None:
    """Store a file of the description of a run in a bucket, in place of an older one."""
    assert isinstance(store, ReplacingStore), "a bucket replaces objects"
    store.replace(name, text.encode())

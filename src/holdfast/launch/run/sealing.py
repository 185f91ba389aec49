"""Whether the checkpoints of a run folder are sealed: decided once, when the run begins.

A folder never holds both kinds. `checkpoint.seal` and the folder's own note (`folder_seal.py`)
have to say the same. The file of the key may move.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from holdfast.config.run import RunConfig
from holdfast.errors import CheckpointError, OtherKeyError, RunFolderError
from holdfast.launch.run.runs import read_resolved
from holdfast.wire.store.folder_seal import FolderSeal, read_seal, write_seal
from holdfast.wire.store.location import seal_store
from holdfast.wire.store.run_location import bucket_of_run
from holdfast.wire.store.run_store import FolderStore, RunStore

KEY = "checkpoint.seal"


def seal_folder(folder: Path, config: RunConfig, *, fresh: bool = False) -> None:
    """Compare `checkpoint.seal` with a run folder, and note there where the key is.

    fresh: what lies there is moved aside. Raises RunFolderError if the folder's checkpoints are
    plain, or sealed with another key, and StoreError if there is no key."""
    source = config.checkpoint.seal
    if bucket_of_run(folder):
        return
    wanted = None
    if source:
        source = source if source == "env" else os.path.abspath(source)
        wanted = FolderSeal(source, seal_store(FolderStore(folder), source).key_id.hex())
    if fresh:
        return
    seal, is_run = read_seal(folder), read_resolved(folder) is not None
    if seal is not None and wanted is None:
        raise RunFolderError(
            f"the checkpoints of this run are sealed, and {KEY} is empty",
            where=str(folder),
            remedy=f"use {KEY}={shlex.quote(seal.source)}, or continue without a seal in another "
            f"folder: {_branch(folder, '')}",
        )
    if seal is None and wanted is not None and is_run:
        raise RunFolderError(
            f"the checkpoints of this run are not sealed, and {KEY} is {config.checkpoint.seal}",
            where=str(folder),
            remedy=f"leave out {KEY}, or continue in another folder: {_branch(folder, source)}",
        )
    if wanted is None or seal == wanted:
        return
    if seal is not None and is_run and seal.key_id not in ("", wanted.key_id):
        raise OtherKeyError(
            f"the checkpoints here are sealed with another key than that of {KEY}",
            where=str(folder),
            remedy="name the key that the run was begun with, or another folder",
        )
    write_seal(folder, wanted)


def _branch(folder: Path, source: str) -> str:
    words = ["holdfast", "branch", str(folder), "--to", f"{folder}-branch", f"{KEY}={source}"]
    return shlex.join(words)


def seal_copies(source: Path, target: RunStore, to: str) -> None:
    """Seal a folder that gets a copy of a sealed run as that run is sealed. Raises CheckpointError
    for a place that has plain checkpoints, and for an address without a seal."""
    seal = None if bucket_of_run(source) else read_seal(source)
    if seal is None or hasattr(target, "inner"):
        return
    remedy = "add ?seal= with the file of its key to the address"
    if isinstance(target, FolderStore):
        if "://" not in to and not any(map(target.list, ("commits/", "data/"))):
            write_seal(target.folder, seal)
            return
        remedy = "name another folder"
    raise CheckpointError(
        "the checkpoints of the run are sealed, and those here are not", where=to, remedy=remedy
    )

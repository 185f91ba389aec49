"""What a start does otherwise for a run in a bucket: probe, description, secret.

No disk is shared, so the run's secret lies in the local folder of the node that began the run. A
person, or what owns the machines, gives it to the other nodes. It never goes into the bucket.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from holdfast.errors import RunFolderError
from holdfast.launch.run.runs import read_secret_files
from holdfast.wire.secret import SECRET_FILE_VARIABLE
from holdfast.wire.store.location import probe_store
from holdfast.wire.store.run_location import (
    bucket_of_run,
    location_of_run,
    replace_run_file,
    store_of_run,
    where_of_run,
)
from holdfast.wire.store.run_store import AlreadyExistsError
from holdfast.wire.term import TERMS_PREFIX

RUN_PREFIXES = (TERMS_PREFIX, "commits/")
"""If a bucket has keys of these and no description, another run's checkpoints are in it."""


def place_word(folder: Path) -> str:
    """Return the run's place as a word of a command line."""
    return shlex.quote(location_of_run(folder))


def begin_again_word(folder: Path) -> str:
    """Return what a person does to begin the run again at step 0."""
    if bucket_of_run(folder):
        return "begin another run with folder=ADDRESS"
    return "start over with --fresh"


def probe_run_store(folder: Path) -> None:
    """Try what a run rests on, if the run is in a bucket. Raises StoreError."""
    if bucket_of_run(folder):
        probe_store(store_of_run(folder), where_of_run(folder))


def refuse_fresh_in_bucket(folder: Path) -> None:
    """Raises RunFolderError if the run is in a bucket: no request renames many objects at once."""
    if bucket_of_run(folder):
        raise RunFolderError(
            "--fresh moves an old run aside, and objects of a bucket cannot be renamed",
            where=where_of_run(folder),
            remedy="begin under another prefix with folder=..., or remove the objects",
        )


def refuse_foreign_bucket(folder: Path) -> None:
    """Raises RunFolderError for a bucket with checkpoints and without the description of a run."""
    store = store_of_run(folder)
    if any(store.list(prefix) for prefix in RUN_PREFIXES):
        raise RunFolderError(
            "there are checkpoints under this prefix, and no description of a run",
            where=where_of_run(folder),
            remedy="name another prefix with folder=..., or this one in checkpoint.bucket",
        )


def require_secret(folder: Path) -> None:
    """Raises RunFolderError if the run is in a bucket and this node does not have its secret.

    A new secret would not be that of the other nodes."""
    if not bucket_of_run(folder) or read_secret_files(folder):
        return
    raise RunFolderError(
        "this node does not have the run's secret, which no bucket holds",
        where=str(folder / "secret"),
        remedy="copy that file here from the node that began the run, with mode 0600, or name a "
        f"copy in {SECRET_FILE_VARIABLE}",
    )


def describe_in_bucket(
    folder: Path, files: dict[str, str], first: str, when_begun: Callable[[], str]
) -> bool:
    """Store the files of a run's description; return True if this begins the run.

    Args:
        files: their contents by name.
        first: the file that begins the run. Of several creators one wins.
        when_begun: returns its content for a run that has begun already, or refuses.
    """
    store, begins = store_of_run(folder), True
    try:
        store.create(first, files[first].encode())
    except AlreadyExistsError:
        begins, files = False, files | {first: when_begun()}
    for name, text in files.items():
        if name != first or not begins:
            replace_run_file(store, name, text)
    return begins

"""Faults of the store while a restore reads it."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from holdfast.core.format.manifest import BLOB_ALIGNMENT
from holdfast.wire.store.run_store import FolderStore, translate_os_error
from tests.support.checkpoint_faults import states
from tests.support.checkpoint_faults.histories import NEWEST, contents, history
from tests.support.checkpoint_faults.oracle import expected
from tests.support.checkpoint_faults.verdict import (
    Restored,
    WrongError,
    judge,
    restore,
    restore_verified,
)

Fails = Callable[[int, str, str], bool]
"""(number of the operation, its name, key) -> whether it fails"""


LAYOUTS = ((0, 3), (1, 6), (2, 7), (5, 4))


class Ailing(FolderStore):
    """A folder whose reads fail when `fails` says so."""

    def __init__(self, folder: Path, fails: Fails) -> None:
        super().__init__(folder)
        self.count = 0
        self.names: list[str] = []
        """What each operation was."""
        self._fails = fails

    def _reach(self, name: str, key: str) -> None:
        number, self.count = self.count, self.count + 1
        self.names.append(name)
        if self._fails(number, name, key):
            raise translate_os_error(OSError(errno.EIO, os.strerror(errno.EIO)), self.folder)

    def get(self, key: str) -> bytes:
        self._reach("get", key)
        return super().get(key)

    def scatter(self, key: str, start: int, outs: Sequence[memoryview]) -> None:
        number, self.count = self.count, self.count + 1
        self.names.append("read")
        if self._fails(number, "read", key) or (start > 0 and self._fails(number, "data", key)):
            raise translate_os_error(OSError(errno.EIO, os.strerror(errno.EIO)), self.folder)
        super().scatter(key, start, outs)

    def list(self, prefix: str) -> Any:
        self._reach("list", prefix)
        return super().list(prefix)

    def size(self, key: str) -> int:
        self._reach("size", key)
        return super().size(key)


def unreadable(folder: Path, rng: random.Random) -> tuple[str, Restored]:
    """The disk cannot read one file any more: as good as not there."""
    made = history(*rng.choice(LAYOUTS))
    made.pour(folder)
    newest = [  # those with data: of the rest only the header is read
        key
        for key, data in made.files.items()
        if f"{NEWEST[0]:010d}-rank" in key and "data" in key and len(data) > BLOB_ALIGNMENT
    ]
    commits = [key for key in made.files if key.startswith("commits/")]
    bad = rng.choice(rng.choice([newest, commits[:1]]))
    names = rng.choice([("get", "read"), ("get", "data")])  # all of it, or all but a blob's header
    store = Ailing(folder, lambda _, name, key: key == bad and name in names)
    found = restore(store, states.topology(rng.randrange(8), 5))
    files = {key: data for key, data in contents(folder).items() if key != bad}
    judge(found, expected(files, made.files))
    return f"{bad} cannot be read", found


def hiccup(folder: Path, rng: random.Random) -> tuple[str, Restored]:
    """One operation fails, and works when it is asked again: no reason to take an older state."""
    made = history(*rng.choice(LAYOUTS))
    made.pour(folder)
    topo = states.topology(rng.randrange(8), 5)
    trial = Ailing(folder, lambda *_: False)
    restore(trial, topo)
    at = rng.randrange(trial.count)
    found = restore(Ailing(folder, lambda number, *_: number == at), topo)
    what = f"operation {at} of {trial.count} fails once"
    # A folder that cannot be listed is said to be so. No older state is taken for that.
    is_listing = trial.names[at] == "list"
    if found.position != NEWEST and (found.position is not None or not is_listing):
        raise WrongError(f"{what}: {found} ({found.sentence}), though the newest is whole")
    return what, found


def dropped(folder: Path, rng: random.Random) -> tuple[str, Restored]:
    """From one operation on nothing answers any more."""
    made = history(*rng.choice(LAYOUTS))
    made.pour(folder)
    topo = states.topology(rng.randrange(8), 5)
    trial = Ailing(folder, lambda *_: False)
    how = rng.choice([restore, restore, restore_verified])
    how(trial, topo)
    at = rng.randrange(trial.count)
    found = how(Ailing(folder, lambda number, *_: number >= at), topo)
    what = f"no answer from operation {at} of {trial.count} on"
    if found.position not in (None, NEWEST):
        raise WrongError(f"{what}: {found} was taken for the newest")
    if found.position is None and found.sentence is None:
        raise WrongError(f"{what}: the run begins from nothing")
    if found.position is None and "--fresh" in str(found.sentence):
        raise WrongError(f"{what}: the advice is to start over: {found.sentence}")
    return what, found

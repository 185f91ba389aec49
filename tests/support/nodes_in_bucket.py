"""Nodes of one run whose store is a bucket, each with a local folder of its own.

`nodes_of` of `nodes.py` takes these instead of nodes with a shared run folder if
HOLDFAST_TEST_STORE is `bucket`. What a test shares with its nodes stays on the disk: run file,
dataset, gate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.config.sections.run_place import local_run_folder
from holdfast.wire.store.location import open_store
from tests.support import s3
from tests.support.commands import secret_file
from tests.support.journal_reader import Journal
from tests.support.nodes import Nodes


class NodesInBucket(Nodes):
    """The agents of a run in a bucket."""

    def __init__(self, run_file: Path, folder: Path, *settings: str) -> None:
        """folder: of the local folders. It stands for the disks of the nodes."""
        super().__init__(run_file, folder, *settings)
        self.outside = s3.location(s3.server())
        self.store = open_store(self.outside)
        self._journal = Journal(folder, self.store)

    def machine(self, name: str) -> list[str]:
        return ["env", f"XDG_CACHE_HOME={self._cache(name)}"]

    def local(self, name: str) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(self._cache(name)))
            return Path(local_run_folder(self.outside))

    def _cache(self, name: str) -> Path:
        return self.folder / name


@contextmanager
def new_nodes(run_file: Path, folder: Path, *settings: str) -> Iterator[Nodes]:
    """Return nodes that have the bucket's credentials and the run's secret, as the test has too."""
    folder.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3.CREDENTIALS.items():
            patch.setenv(name, value)
        patch.setenv("HOLDFAST_SECRET_FILE", str(secret_file(folder)))
        patch.setenv("XDG_CACHE_HOME", str(folder / "test"))
        yield NodesInBucket(run_file, folder, *settings)

"""A run whose folder is lost goes on from its bucket, as if nothing had happened."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from holdfast.checkpoint.restore import Checkpoint, listing, step_of
from holdfast.events import StepDone
from holdfast.wire.journal import read
from holdfast.wire.runstore import FolderStore, RunStore
from holdfast.wire.stores import open_store
from tests.cli.support import apart, write_run_file
from tests.wire import s3


def _checksums(store: RunStore, key: str) -> list[tuple[str, ...]]:
    return [writer.blob.checksums for writer in Checkpoint.open(store, key).commit.writers]


def test_a_run_goes_on_from_its_bucket_when_its_folder_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    where = s3.location(s3.server())
    bucket = open_store(where)
    run_file = write_run_file(tmp_path)
    arguments = ("train", run_file, f"checkpoint.bucket={where}")
    first = apart(*arguments)
    assert first.code == 0, first.err
    last, before = listing(bucket)
    assert (step_of(last), step_of(before)) == (6, 3)
    expected = _checksums(bucket, last)

    bucket.delete(last)  # the machine was lost before step 6 was sent
    shutil.rmtree(tmp_path / "run")
    apart(*arguments, "--fresh").refuses_last("checkpoint.bucket", "set aside", "another prefix")
    second = apart(*arguments)
    assert second.code == 0, second.err
    assert "step 3 was brought back from the bucket" in second.out + second.err
    records = read(FolderStore(tmp_path / "run"))
    assert sorted({r.event.step for r in records if isinstance(r.event, StepDone)}) == [4, 5, 6]
    (again,) = (key for key in listing(bucket) if step_of(key) == 6)
    assert _checksums(bucket, again) == expected
    assert b"not-a-secret" not in b"".join(
        path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()
    )

"""A run whose folder is lost resumes from its bucket, as if nothing had happened."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from holdfast.checkpoint.restore.catalog import list_commits, step_of
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.core.format.manifest import parse_commit_key
from holdfast.events import CheckpointRestored, Record, SourceRejected, StepDone
from holdfast.wire.journal import read_journal
from holdfast.wire.store.location import open_store
from holdfast.wire.store.run_store import FolderStore, RunStore
from tests.support import s3
from tests.support.commands import apart, start, write_run_file
from tests.support.ranks import wait_until


def _checksums(store: RunStore, key: str) -> list[tuple[str, ...]]:
    return [writer.blob.checksums for writer in Checkpoint.open(store, key).commit.writers]


@pytest.mark.slow
def test_a_run_goes_on_from_its_bucket_when_its_folder_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    where = s3.location(s3.server())
    bucket = open_store(where)
    run_file = write_run_file(tmp_path)
    arguments = ("train", run_file, f"checkpoint.bucket={where}")
    apart(*arguments).succeeds()
    last, before = list_commits(bucket)
    assert (step_of(last), step_of(before)) == (6, 3)
    expected = _checksums(bucket, last)

    bucket.delete(last)  # the machine was lost before step 6 was sent
    shutil.rmtree(tmp_path / "run")
    apart(*arguments, "--fresh").refuses_last("checkpoint.bucket", "set aside", "another prefix")
    second = apart(*arguments).succeeds()
    assert "step 3 was brought back from the bucket" in second.out + second.err
    records = read_journal(FolderStore(tmp_path / "run"))
    assert sorted({r.event.step for r in records if isinstance(r.event, StepDone)}) == [4, 5, 6]
    (again,) = (key for key in list_commits(bucket) if step_of(key) == 6)
    assert _checksums(bucket, again) == expected
    assert b"not-a-secret" not in b"".join(
        path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()
    )


def _stopped(run_file: Path, folder: Path, generation: int, *settings: str) -> list[Record]:
    """Train until the generation has committed a checkpoint, then Ctrl-C; its records."""
    process = start("train", run_file, "train.steps=100000", "train.evaluate.every=0", *settings)
    store = FolderStore(folder)

    def committed() -> bool:
        return any(
            (parse_commit_key(key) or (0, 0))[1] == generation for key in list_commits(store)
        )

    try:
        wait_until(lambda: committed() or process.poll() is not None, 90, "a checkpoint")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, said
    return [record for record in read_journal(store) if record.generation == generation]


@pytest.mark.slow
def test_a_run_goes_on_from_what_its_folder_and_its_bucket_have_together(
    tmp_path: Path, s3_credentials: None
) -> None:
    """The folder's newest checkpoint rots in one blob and loses another. Without any checkpoint,
    and without a bucket, the run says so instead of beginning again."""
    where = s3.location(s3.server())
    run_file, folder = write_run_file(tmp_path), tmp_path / "run"
    settings = (f"checkpoint.bucket={where}", "checkpoint.every_steps=20")
    _stopped(run_file, folder, 1, *settings)
    newest = list_commits(FolderStore(folder))[0]
    assert list_commits(open_store(where))[0] == newest
    rotten, gone = sorted((folder / "data" / "0000000001").glob(f"{step_of(newest):010d}-*"))
    data = bytearray(rotten.read_bytes())
    data[-1] ^= 1
    rotten.write_bytes(data)
    gone.unlink()

    records = _stopped(run_file, folder, 2, *settings)
    restored = [r.event for r in records if isinstance(r.event, CheckpointRestored)]
    assert {event.step for event in restored} == {step_of(newest)}
    assert sum(event.sources.get("bucket", 0) for event in restored) > 0
    rejected = [r.event for r in records if isinstance(r.event, SourceRejected)]
    assert {event.source for event in rejected} == {"run store"}
    assert any("checksum does not match" in event.reason for event in rejected)

    last = step_of(list_commits(FolderStore(folder))[0])
    for commit in (folder / "commits").iterdir():
        commit.unlink()
    third = apart("train", run_file, "train.steps=100000", "train.evaluate.every=0")
    third.refuses_last(f"a checkpoint of step {last}, and none is left", "--fresh", code=3)

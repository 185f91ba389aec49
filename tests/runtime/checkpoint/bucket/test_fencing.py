"""A bucket belongs to one line of generations: a node that was cut off neither adds nor removes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from holdfast.checkpoint.bucket.copy import copy_checkpoint
from holdfast.checkpoint.bucket.fencing import adopt_bucket_generation
from holdfast.checkpoint.bucket.recover_folder import recover_folder
from holdfast.checkpoint.bucket.uploader import Uploader
from holdfast.checkpoint.format.save_context import SaveContext
from holdfast.checkpoint.restore.catalog import list_commits, step_of
from holdfast.checkpoint.restore.start_records import record_start
from holdfast.checkpoint.restore.verify import verify
from holdfast.checkpoint.save import retention
from holdfast.checkpoint.save.retention import RetentionRules
from holdfast.checkpoint.save.writer import try_commit
from holdfast.core.format.manifest import Commit, commit_key, part_prefix
from holdfast.core.sharding.state_table import TensorSpec
from holdfast.errors import CheckpointError, OtherKeyError
from holdfast.events import CheckpointUploaded, Event, UploadFailed
from holdfast.wire.store.encrypted_store import EncryptedStore
from holdfast.wire.store.location import SEAL_KEY_VARIABLE, open_store
from holdfast.wire.store.run_store import Buffer, FolderStore
from holdfast.wire.term import create_generation, newest_generation
from tests.support.mover_process import newest_verified, topology, write_noise

TABLE = (TensorSpec("model.embed.weight", "F32", (37, 8), 0),)
KEY_ID_FROM_END = 4 + 32 + 8  # of a sealed object's footer: index bytes, salt, and the id itself


def save(store: FolderStore, generation: int, step: int, ranks: int = 2) -> Commit | None:
    """What a mover does for every rank, without one."""
    topo = topology(1, ranks, generation)
    plan = SaveContext(generation, topo, TABLE, "c", "d", extent_bytes=1024)
    if newest_generation(store) < generation:
        create_generation(store, generation, {})
    for rank in range(ranks):
        write_noise(store, plan, step, rank, seed=step)
    return try_commit(store, plan, step)


def upload(store: FolderStore, bucket: FolderStore, last: int = 1) -> list[Event]:
    """A mover's uploader from its start, which sends what is newest, to its end."""
    events: list[Event] = []
    Uploader(store, lambda: bucket, RetentionRules(last), events.append).close(60)
    return events


def told(events: Iterable[Event]) -> list[tuple[type, int | None]]:
    return [(type(event), event.step) for event in events]


def steps(store: FolderStore) -> list[int]:
    return [step_of(key) for key in list_commits(store)]


@pytest.fixture
def stores(tmp_path: Path) -> list[FolderStore]:
    names = ("old", "new", "bucket", "lost")
    for name in names:
        (tmp_path / name).mkdir()
    return [FolderStore(tmp_path / name) for name in names]


def location(bucket: FolderStore) -> str:
    return f"file://{bucket.folder}"


def test_a_machine_that_was_cut_off_neither_sends_nor_removes(stores: list[FolderStore]) -> None:
    old, new, bucket, lost = stores
    save(old, 1, 50)
    assert told(upload(old, bucket)) == [(CheckpointUploaded, 50)]
    recover_folder(new, location(bucket), "c", False, lambda text: None)
    save(new, 2, 60)
    assert told(upload(new, bucket)) == [(CheckpointUploaded, 60)]
    before = [*bucket.list("data/"), *bucket.list("generations/")]
    save(old, 1, 70)
    (failed,) = upload(old, bucket)
    assert isinstance(failed, UploadFailed)
    assert "belongs to generation 2" in failed.reason
    assert steps(bucket) == [60]
    assert [*bucket.list("data/"), *bucket.list("generations/")] == before
    recover_folder(lost, location(bucket), "c", False, lambda text: None)
    assert steps(lost) == [60]
    # A trainer that starts there is a person's decision: it takes over, and the other is cut off.
    adopt_bucket_generation(old, bucket, pytest.fail)
    save(old, newest_generation(old) + 1, 71)
    assert told(upload(old, bucket)) == [(CheckpointUploaded, 71)]
    save(new, 2, 65)
    assert told(upload(new, bucket)) == [(UploadFailed, 65)]


def test_two_that_counted_on_alike_are_told_apart(stores: list[FolderStore]) -> None:
    old, new, bucket, _ = stores
    for number, store in enumerate((old, new)):
        create_generation(store, 2, {"opened by": number})
        save(store, 2, 5 + number)
    assert told(upload(old, bucket)) == [(CheckpointUploaded, 5)]
    assert told(upload(new, bucket)) == [(UploadFailed, 6)]
    adopt_bucket_generation(new, bucket, pytest.fail)
    generation = newest_generation(new) + 1
    assert generation == 4
    save(new, generation, 7)
    assert told(upload(new, bucket)) == [(CheckpointUploaded, 7)]
    save(old, 2, 8)
    assert told(upload(old, bucket)) == [(UploadFailed, 8)]


def test_who_is_overtaken_on_the_way_makes_no_commit_object(stores: list[FolderStore]) -> None:
    class Overtaken(FolderStore):
        def create(self, key: str, data: Buffer | Iterable[Buffer]) -> None:
            super().create(key, data)
            if "rank00001" in key and newest_generation(self) < 2:
                create_generation(self, 2, {})

    old, _, bucket, _ = stores
    save(old, 1, 5)
    target = Overtaken(bucket.folder)
    assert told(upload(old, target)) == [(UploadFailed, 5)]
    assert steps(bucket) == []
    assert bucket.list("data/")  # not ours to remove any more


def test_what_was_swept_on_the_way_makes_no_checkpoint(stores: list[FolderStore]) -> None:
    old, _, bucket, _ = stores
    save(old, 1, 70)

    def sweep(done: int, total: int) -> None:
        if done < total:
            retention.sweep_older_generations(bucket, 2)

    with pytest.raises(CheckpointError, match=r"somebody removed or changed data/.*copy it again"):
        copy_checkpoint(old, commit_key(1, 70), bucket, sweep, read_back=False)
    assert steps(bucket) == []


def test_a_branch_that_was_given_up_is_not_sent_and_counts_for_nothing(
    stores: list[FolderStore],
) -> None:
    old, _, bucket, lost = stores
    for step in (90, 100):
        save(old, 1, step)
    copy_checkpoint(old, commit_key(1, 100), bucket)  # it had arrived before
    create_generation(old, 2, {})
    record_start(old, 2, 90)
    (old.folder / "starts" / "0000000002.json~").write_text("an editor's copy")
    assert told(upload(old, bucket)) == [(CheckpointUploaded, 90)]
    for step in (92, 95):
        save(old, 2, step)
        events: list[Event] = []
        uploader = Uploader(old, lambda: bucket, RetentionRules(1), events.append)
        uploader.close(60)
        assert told(events) == [(CheckpointUploaded, step)]
        assert uploader.wait_for_newest(0) is None  # although 100 is later
    assert steps(bucket) == [100, 95]
    recover_folder(lost, location(bucket), "c", False, lambda text: None)
    assert steps(lost) == [95]
    assert [k for k in lost.list("starts/") if b"null" not in lost.get(k)] == [
        "starts/0000000002.json"
    ]


def test_what_was_found_rotten_is_not_sent(stores: list[FolderStore]) -> None:
    old, _, bucket, _ = stores
    for step in (5, 6):
        save(old, 1, step)
    events: list[Event] = []
    rejected = (commit_key(1, 6),)
    uploader = Uploader(
        old, lambda: bucket, RetentionRules(2), events.append, rejected_keys=lambda: rejected
    )
    uploader.close(60)
    assert told(events) == [(CheckpointUploaded, 5)]
    assert uploader.wait_for_newest(0) is None


def flip_key_id(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-KEY_ID_FROM_END] ^= 1
    path.write_bytes(data)


def test_another_key_stops_only_a_run_that_has_nothing_else(
    stores: list[FolderStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, here, bucket, lost = stores
    monkeypatch.setenv(SEAL_KEY_VARIABLE, "ab" * 32)
    sealed = f"{location(bucket)}?seal=env"
    save(source, 1, 2)
    copy_checkpoint(source, commit_key(1, 2), open_store(sealed))
    save(here, 1, 1)
    monkeypatch.setenv(SEAL_KEY_VARIABLE, "cd" * 32)
    said: list[str] = []
    recover_folder(here, sealed, "c", False, said.append)
    assert "without its bucket for now" in said[-1]
    with pytest.raises(OtherKeyError, match="sealed with another key"):
        recover_folder(lost, sealed, "c", False, said.append)
    monkeypatch.setenv(SEAL_KEY_VARIABLE, "ab" * 32)
    recover_folder(lost, sealed, "c", False, said.append)
    assert newest_verified(lost).step == 2


def test_a_half_sent_blob_whose_end_is_rotten_is_sent_anew(stores: list[FolderStore]) -> None:
    source, _, bucket, _ = stores
    save(source, 1, 3)
    sealed = EncryptedStore(bucket, b"k" * 32)
    blob = source.list("data/")[0]
    sealed.create(blob, source.get(blob))
    flip_key_id(bucket.folder / blob)
    copied = copy_checkpoint(source, commit_key(1, 3), sealed, read_back=False)
    assert copied.present_bytes == 0
    assert verify(sealed, commit_key(1, 3)) == []


def test_the_claim_of_a_copy_is_no_part_of_a_save(stores: list[FolderStore]) -> None:
    store = stores[0]
    store.create(f"{part_prefix(1, 5)}claim", b"of a copy that was killed")
    assert save(store, 1, 5) is not None
    assert verify(store, commit_key(1, 5)) == []

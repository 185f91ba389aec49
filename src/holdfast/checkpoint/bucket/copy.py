"""Copying a checkpoint into another run store.

The order is that of a save: blobs, parts, the commit object last. So a copy that is cut short is no
checkpoint there. The same command resumes it: an object that is there and matches its checksums is
not copied again. Every extent is checked as it streams by, and none is held that the target has
taken. A copy first claims the step there, so that two different checkpoints of one step do not mix
(`copy_lease.py`). It removes the claim after the commit object. Two copies of the same checkpoint
may run side by side: each accepts an object that the other wrote intact. Each removes only an
object that it has just read and found broken (`_replace`): any other may be committed by now.
Nothing secret is copied: a run's secret is no part of its checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial

from xxhash import xxh3_128_hexdigest

from holdfast.checkpoint.bucket.copy_lease import LEASE_EXPIRY_S, CopyLease
from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.core.format.manifest import Blob, Commit, WriterShare, part_key, writer_name
from holdfast.errors import CheckpointError, CorruptError, FencedError, OtherKeyError
from holdfast.wire.store.run_store import (
    AlreadyExistsError,
    ChecksummedStore,
    MissingKeyError,
    RunStore,
)
from holdfast.wire.term import create_generation, generation_key, newest_generation

RUN_FOLDER_FILES = ("run.yaml", "environment.json", "resolved.json")
"""Objects that make a folder a run folder. A copy adds the missing ones, the decisive one last."""

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class CopyResult:
    """Bytes of blobs that were copied, and that were there already."""

    key: str
    step: int
    copied_bytes: int
    present_bytes: int


def copy_checkpoint(
    source: RunStore,
    key: str,
    target: RunStore,
    on_blob: OnProgress = lambda done, total: None,
    *,
    read_back: bool = True,
    on_extent: OnProgress = lambda done, total: None,
    check_fence: Callable[[], None] = lambda: None,
    lease_expiry_s: float = LEASE_EXPIRY_S,
    say: Callable[[str], None] = lambda text: None,
    config_hash: str = "",
) -> CopyResult:
    """Copy one checkpoint; done again, it copies nothing. Without `read_back`, a large blob in a
    bucket is compared by the checksum that the bucket keeps next to it, and not read. `on_blob` is
    called for each blob that has arrived, `on_extent` for each extent that is handed over.
    `check_fence` is called just before the commit object is made, and raises if it may not be.
    `say` is called when another copy's claim is watched, for `lease_expiry_s` seconds at most.
    `config_hash`: the identity of the target, if it is another run that begins from this state.

    Raises CheckpointError when the source is broken, the target belongs to another run, or an
    object that had arrived was removed there. Raises what the stores raise. An object in the target
    that is not what it should be is replaced.
    """
    raw = source.get(key)
    commit = Commit.from_bytes(raw, key)
    if config_hash:
        commit = replace(commit, config_hash=config_hash)
        raw = commit.to_bytes()
    with ExitStack() as stack:
        claim: CopyLease | _NoLease = _NoLease()
        if not _check_target(target, commit, raw):
            claim = stack.enter_context(
                _acquire_lease(target, commit, raw, lease_expiry_s, say).keep_renewed()
            )
        copied = there = 0
        for writer in commit.writers:
            blob, whole = writer.blob, partial(_is_blob_intact, target, writer.blob)
            told = partial(_report_extent, on_extent, copied + there, commit.nbytes, claim.check)
            content = partial(_read_checked, source, blob, told)
            arrived = (not read_back and _matches_by_checksum(source, target, blob)) or whole()
            if arrived or not _create_or_replace(target, blob.key, content, whole, claim):
                there += blob.size
            else:
                copied += blob.size
            on_blob(copied + there, commit.nbytes)
            _copy_part(source, target, commit, writer, claim)
        _copy_run_description(source, target, commit)
        _check_blobs_present(target, commit)
        claim.renew()
        check_fence()
        try:
            target.create(key, raw)
        except AlreadyExistsError:
            _check_target(target, commit, raw)
    claim.release()
    return CopyResult(key, commit.step, copied, there)


def _acquire_lease(
    target: RunStore, commit: Commit, raw: bytes, lease_expiry_s: float, say: Callable[[str], None]
) -> CopyLease:
    """Say which checkpoint of the step is brought. Raises LeaseHeldError where another one is."""
    claim = CopyLease(target, commit, xxh3_128_hexdigest(raw), lease_expiry_s, say)
    claim.acquire()
    try:  # another copy may have ended between the two
        _check_target(target, commit, raw)
    except CheckpointError:
        claim.release()
        raise
    return claim


class _NoLease:
    """None is needed where the checkpoint lies already."""

    def check(self) -> None: ...
    def renew(self) -> None: ...
    def release(self) -> None: ...


def _check_target(target: RunStore, commit: Commit, raw: bytes) -> bool:
    """A target that holds checkpoints of another run, or another one of this step. Whether it holds
    this one."""
    held = False
    for key in list_commits(target):
        try:
            stored = target.get(key)
            theirs = Commit.from_bytes(stored, key)
        except (CorruptError, CheckpointError, MissingKeyError):
            continue
        if theirs.config_hash != commit.config_hash:
            raise CheckpointError(
                f"holds checkpoints of another run ({key})",
                where="the target",
                remedy="name a new folder",
            )
        if key == commit.key and stored != raw:
            raise CheckpointError(
                f"holds another checkpoint of step {commit.step}, generation {commit.generation}",
                where="the target",
                remedy="name a new folder",
            )
        held = held or key == commit.key
    return held


def _is_blob_intact(store: RunStore, blob: Blob) -> bool:
    """Return True if every byte of the blob is there."""
    try:
        if store.size(blob.key) != blob.size:
            return False
        for _ in _read_checked(store, blob):
            pass
    except (MissingKeyError, CorruptError, CheckpointError, OtherKeyError):
        return False
    return True


def _check_blobs_present(target: RunStore, commit: Commit) -> None:
    """Check that no blob was swept while the rest was on its way."""
    for writer in commit.writers:
        try:
            found = target.size(writer.blob.key)
        except (MissingKeyError, CorruptError):
            found = -1
        if found != writer.blob.size:
            raise CheckpointError(
                f"somebody removed or changed {writer.blob.key} there while the checkpoint was "
                "copied",
                where="the target",
                remedy="copy it again",
            )


def _matches_by_checksum(source: RunStore, target: RunStore, blob: Blob) -> bool:
    if not isinstance(target, ChecksummedStore):
        return False
    return target.has_same_bytes(blob.key, _read_checked(source, blob))


def _report_extent(
    on_extent: OnProgress,
    bytes_before: int,
    total: int,
    check_lease: Callable[[], None],
    count: int,
) -> None:
    check_lease()
    on_extent(bytes_before + count, total)


def _read_checked(
    store: RunStore, blob: Blob, on_extent: Callable[[int], None] = lambda count: None
) -> Iterator[memoryview]:
    """The blob's bytes, an extent at a time, each checked before it is passed on. Every one has
    memory of its own: a bucket's client may still send the last while the next is read."""
    for extent in blob.extents():
        view = memoryview(bytearray(extent.length))
        try:
            store.read_into(blob.key, extent.offset, view)
        except (MissingKeyError, CorruptError) as error:
            raise _broken_error(str(error)) from error
        if xxh3_128_hexdigest(view) != extent.xxh3:
            raise _broken_error(f"{blob.key}: checksum does not match at byte {extent.offset}")
        yield view
        on_extent(extent.offset + extent.length)


def _broken_error(what: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint is not whole: {what}",
        remedy="copy another step; see which are intact with: holdfast checkpoint verify RUN",
    )


def _create_or_replace(
    store: RunStore,
    key: str,
    content: Callable[[], Iterator[memoryview]],
    is_intact: Callable[[], bool],
    lease: CopyLease | _NoLease,
) -> bool:
    """Create an object under the claim, in place of a broken one if needed; return True if it was
    needed. An object that came meanwhile, and is `is_intact`, is another copy's of this very
    checkpoint. It may be committed, and a process that removes it may die before it writes it
    again."""
    lease.check()
    with suppress(AlreadyExistsError):
        store.create(key, content())
        return True
    lease.renew()  # asks, where `check` may trust: what seems broken could be another checkpoint's
    if is_intact():
        return False
    lease.check()  # that look may have taken long; nothing else stands between it and the removal
    store.delete(key)
    with suppress(AlreadyExistsError):
        store.create(key, content())
        return True
    if is_intact():
        return False
    raise CheckpointError(
        f"somebody else writes {key} there at the same time",
        where="the target",
        remedy="copy it again once the other copy has ended",
    )


def _copy_part(
    source: RunStore,
    target: RunStore,
    commit: Commit,
    writer: WriterShare,
    lease: CopyLease | _NoLease,
) -> None:
    key = part_key(commit.generation, commit.step, writer_name(writer.rank))
    try:
        data = source.get(key)
    except MissingKeyError as error:
        raise _broken_error(str(error)) from error
    if xxh3_128_hexdigest(data) != writer.part_xxh3:
        raise _broken_error(f"{key}: checksum does not match")
    same = partial(_is_stored, target, key, data)
    if not same():
        _create_or_replace(target, key, lambda: iter([memoryview(data)]), same, lease)


def _is_stored(store: RunStore, key: str, data: bytes) -> bool:
    with suppress(MissingKeyError, CorruptError, OtherKeyError):
        return store.get(key) == data
    return False


def _copy_run_description(source: RunStore, target: RunStore, commit: Commit) -> None:
    """Make the target a run folder that commands can open and a run can resume in. Copy the run's
    description, and the generation, so that the next one there is newer."""
    for name in RUN_FOLDER_FILES:
        with suppress(MissingKeyError, AlreadyExistsError):
            target.create(name, source.get(name))
    if commit.generation > newest_generation(target):
        try:
            target.create(
                generation_key(commit.generation), source.get(generation_key(commit.generation))
            )
        except MissingKeyError:
            with suppress(FencedError):
                create_generation(target, commit.generation, {})
        except AlreadyExistsError:
            return

"""Tier 3: what is committed in the run folder goes on into a bucket, behind the training.

One thread of the mover copies the newest committed checkpoint, then waits for the next. A bucket
that is slow, away or full delays nothing else: what is newer takes the place of what still waits,
and a copy that failed is tried again, later each time. A copy is of the same objects in the same
order (`copying.py`), so that one that was killed is no checkpoint there, and the next mover goes on
with the blobs that have not arrived.

A run whose folder is lost begins from the bucket: `bring_back` copies the newest whole checkpoint
into the folder before anything else is asked there, so there is one read path.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from holdfast.checkpoint import cleaning
from holdfast.checkpoint.copying import copy_checkpoint
from holdfast.checkpoint.restore import Checkpoint, listing, step_of
from holdfast.errors import CheckpointError, CorruptError, HoldfastError, StoreError
from holdfast.events import CheckpointUploaded, Event, UploadFailed
from holdfast.wire.runstore import MissingKeyError, RunStore
from holdfast.wire.stores import UnfitStoreError, open_store, probe

RETRY_SECONDS = (1.0, 60.0)
"""Pause after the first failure, and the longest one; doubled in between."""
CLOSE_SECONDS = 20.0
"""How long a mover that ends waits for its last upload; what is left is sent at the next start."""


class Uploader:
    """Thread-safe. `open_target` is called on the uploading thread, until it has succeeded once."""

    def __init__(
        self,
        source: RunStore,
        open_target: Callable[[], RunStore],
        keep: cleaning.Keep,
        tell: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source, self._open_target, self._keep = source, open_target, keep
        self._tell, self._clock = tell, clock
        self._change = threading.Condition()
        self._target: RunStore | None = None
        self._wanted: str | None = None
        self._key: str | None = None  # being sent
        self._failed = False
        self._busy = True  # until the first look at what lies in the source
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
        self._thread.start()

    def committed(self, key: str) -> None:
        """The source has a new checkpoint."""
        with self._change:
            self._wanted = key
            self._change.notify_all()

    def underway(self) -> tuple[str, ...]:
        """The checkpoint that is being sent: it must not be removed meanwhile, or a bucket that is
        slower than retention would never get a whole one."""
        with self._change:
            return () if self._key is None else (self._key,)

    def close(self, wait: float = CLOSE_SECONDS) -> None:
        """Let end what is on its way, for a while; a bucket that fails is not waited for."""
        with self._change:
            self._change.wait_for(
                lambda: not self._busy and (self._wanted is None or self._failed), wait
            )
            self._closing = True
            self._change.notify_all()

    def _work(self) -> None:
        self._look_back()
        pause = RETRY_SECONDS[0]
        while (key := self._next()) is not None:
            if self._upload(key):
                pause = RETRY_SECONDS[0]
                self._done(None)
                continue
            self._done(key)
            with self._change:
                self._change.wait_for(lambda: self._closing, pause)
            pause = min(2 * pause, RETRY_SECONDS[1])

    def _look_back(self) -> None:
        """The newest that an earlier mover committed, and perhaps did not finish sending."""
        try:
            found = listing(self._source)
        except HoldfastError:
            found = []  # the run store has its own way to say so
        with self._change:
            if found and self._wanted is None:
                self._wanted = found[0]
            self._busy = False
            self._change.notify_all()

    def _next(self) -> str | None:
        """The newest checkpoint that waits; None at the end."""
        with self._change:
            self._change.wait_for(lambda: self._closing or self._wanted is not None)
            if self._closing:
                return None
            self._key, self._wanted, self._busy = self._wanted, None, True
            return self._key

    def _done(self, again: str | None) -> None:
        with self._change:
            self._wanted = self._wanted or again
            self._key, self._busy = None, False
            self._change.notify_all()

    def _upload(self, key: str) -> bool:
        """Whether there is nothing left to do for this checkpoint."""
        begun = self._clock()
        try:
            if self._target is None:
                self._target = self._open_target()
            copied = copy_checkpoint(self._source, key, self._target, read_back=False)
            self._failed = False
            seconds = self._clock() - begun
            self._tell(CheckpointUploaded(key, copied.copied, seconds, step=copied.step))
            with suppress(HoldfastError):  # then the next upload removes what is too old
                cleaning.retain(self._target, self._keep, (), ())
        except (MissingKeyError, CheckpointError) as error:
            # Removed meanwhile, as a newer one is there; or broken, and to be found out elsewhere.
            self._say(key, error)
            return True
        except Exception as error:
            self._say(key, error)
            return False
        return True

    def _say(self, key: str, error: Exception) -> None:
        """Once until an upload has succeeded."""
        if not self._failed:
            known = isinstance(error, HoldfastError)
            text = str(error) if known else f"{type(error).__name__}: {error}"
            self._tell(UploadFailed(key, text, step=step_of(key)))
        self._failed = True


def opened(location: str) -> RunStore:
    """The bucket of a location, probed. Raises StoreError."""
    store = open_store(location)
    probe(store, location.partition("?")[0])
    return store


def bring_back(
    folder: RunStore, location: str, config_hash: str, fresh: bool, say: Callable[[str], None]
) -> None:
    """Copy the bucket's newest whole checkpoint into a run folder that has none so new.

    Raises CheckpointError when the bucket belongs to another run, or `fresh` asks for a beginning
    where checkpoints lie already; StoreError for a location or a server that cannot do, and where
    the folder has no checkpoint and the bucket cannot be asked: a run that began at step 0 because
    of a bucket that is away would lose what lies there.
    """
    here = max(map(step_of, listing(folder)), default=-1)
    bucket = open_store(location)
    try:
        probe(bucket, location.partition("?")[0])
        there = listing(bucket)
    except UnfitStoreError:
        raise
    except StoreError as error:
        if here < 0 and not fresh:
            raise
        say(f"the run goes on without its bucket for now: {error}")
        return
    if fresh and there:
        raise CheckpointError(
            f"holds checkpoints of the run that is set aside (step {step_of(there[0])})",
            where="checkpoint.bucket", remedy="name another prefix",
        )  # fmt: skip
    for key in there:
        if step_of(key) <= here or _brought(folder, bucket, key, config_hash, say):
            return


def _brought(
    folder: RunStore, bucket: RunStore, key: str, config_hash: str, say: Callable[[str], None]
) -> bool:
    """Whether this checkpoint is in the folder now; what is broken is said and passed over."""
    try:
        commit = Checkpoint.open(bucket, key).commit
    except StoreError:
        raise
    except (HoldfastError, MissingKeyError) as error:
        say(f"a checkpoint in the bucket cannot be trusted: {error}")
        return False
    if commit.config_hash != config_hash:
        raise CheckpointError(
            "holds checkpoints of another run", where="checkpoint.bucket",
            remedy="name another prefix",
        )  # fmt: skip
    try:
        copied = copy_checkpoint(bucket, key, folder)
    except (CheckpointError, CorruptError, MissingKeyError) as error:
        say(f"a checkpoint in the bucket cannot be trusted: {error}")
        return False
    say(f"step {copied.step} was brought back from the bucket")
    return True

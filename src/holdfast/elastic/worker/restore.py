"""Restores the state that a worker's generation begins from.

The mover lists the blobs that it has in memory. They are mapped and read in place, so a state that
outlived its worker is copied once, into the tensors. Missing blobs come from peers, then from the
run store, then from the bucket, which is opened only for that. This process alone checks every
byte, while it reads.

If a blob in this node's memory is corrupt, everything is read once more, also from peers that hold
the same. If a blob is corrupt everywhere, this worker exits, and its agent starts again from the
next older checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from holdfast.checkpoint.mover.client import MoverClient
from holdfast.checkpoint.peers.client import PeerError
from holdfast.checkpoint.peers.source import PeerBlobs
from holdfast.checkpoint.restore.catalog import listing
from holdfast.checkpoint.restore.fallback_store import BUCKET, Second
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.sources import MappedSource, Mixed, Source, StoreSource, Tally
from holdfast.core.format.manifest import Commit
from holdfast.core.sharding.boxes import Box
from holdfast.elastic.protocol.worker_spec import WorkerBoot
from holdfast.elastic.worker.reporter import Reporter
from holdfast.errors import CorruptError, HoldfastError, RunFolderError, StoreError
from holdfast.events import CheckpointRestored, SourceRejected
from holdfast.train.build import Session
from holdfast.wire.secret import Secret
from holdfast.wire.store.location import open_store
from holdfast.wire.store.run_store import FolderStore, MissingKeyError

logger = logging.getLogger(__name__)


class RottenError(HoldfastError):
    """No source has every byte of the checkpoint as it was written."""


_UNREAD = (CorruptError, MissingKeyError, RunFolderError, StoreError, PeerError)
"""Errors of a source that does not deliver: its copy is corrupt, missing, or out of reach."""


def restore(
    boot: WorkerBoot, session: Session, reporter: Reporter, secret: Secret | None,
    check: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Load the state after `spec.start_step`, box by box, or make it from the seed.

    `check` is called meanwhile, and raises to end the restore. Raises CorruptCheckpointError, and
    HoldfastError if a source that may be intact cannot be reached.
    """
    key = boot.restore_key
    if key is None:
        session.engine.initialise(session.config.seed)
        return
    begun, opening, tally = time.monotonic(), 0.0, Tally()

    def read(everywhere: bool) -> None:
        nonlocal opening, tally
        with _opened(boot, key, secret, everywhere) as checkpoint:
            opening, tally = time.monotonic() - begun, checkpoint.tally
            _load(session, _Boxes(checkpoint, boot.start_step, reporter, check), boot.run_folder)

    try:
        try:
            read(everywhere=False)
        except (*_UNREAD, RottenError) as error:
            if MappedSource.name not in {source for source, _, _ in tally.problems}:
                raise  # all who may have it were asked
            logger.warning("trying all peers too: %s", error)
            read(everywhere=True)
    except (CorruptError, MissingKeyError) as error:
        raise RottenError(str(error)) from error
    for source, blob, reason in dict.fromkeys(tally.problems):
        logger.warning("%s: %s; another source had it", source, reason)
        reporter.emit(SourceRejected(boot.rank, source, blob, reason, step=boot.start_step))
    reporter.emit(
        CheckpointRestored(
            boot.rank, key, sum(tally.bytes.values()), time.monotonic() - begun,
            {"open": opening, **tally.seconds}, dict(tally.bytes), step=boot.start_step,
        )
    )  # fmt: skip


def _load(session: Session, boxes: _Boxes, run_folder: str) -> None:
    """Load the state; if a source fails, rather than the bytes, try once more.

    A store that answers but cannot read this has a corrupt disk. A store that does not answer
    proves nothing. A peer that fails twice counts as corrupt: its blobs must not keep the run from
    continuing.
    """
    try:
        session.engine.load(boxes)
        return
    except (RunFolderError, StoreError, PeerError) as error:
        logger.warning("trying once more: %s", error)
    try:
        session.engine.load(boxes)
    except PeerError as error:
        raise RottenError(f"it cannot be read: {error}") from error
    except (RunFolderError, StoreError) as error:
        listing(FolderStore(run_folder))  # raises when it is out of reach
        raise RottenError(f"it cannot be read: {error}") from error


class _Boxes:
    """Reads one box, or many in one pass, and reports meanwhile that this rank is alive."""

    def __init__(
        self, checkpoint: Checkpoint, step: int, reporter: Reporter, check: Callable[[], None]
    ) -> None:
        self._checkpoint, self._step, self._reporter = checkpoint, step, reporter
        self._check = check

    def __call__(self, box: Box, out: Tensor) -> None:
        self._alive()
        self._checkpoint.read(box, _bytes(out))

    def many(self, wanted: Sequence[tuple[Box, Tensor]]) -> None:
        self._alive()
        self._checkpoint.read_all(((box, _bytes(out)) for box, out in wanted), self._alive)

    def _alive(self) -> None:
        self._check()
        self._reporter.progress(self._step, "restore")


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


@contextmanager
def _opened(
    boot: WorkerBoot, key: str, secret: Secret | None, everywhere: bool = False
) -> Iterator[Checkpoint]:
    """Open the checkpoint over all sources, cheapest first; memory is given back at the end.

    ask_all_peers: also use peers for blobs that this node's memory has. They are not asked before
    that is needed.
    """
    store = FolderStore(boot.run_folder)
    if not boot.mover_socket or secret is None:
        yield Checkpoint(store, Commit.from_bytes(store.get(key), key))
        return
    mover = MoverClient(boot.mover_socket, secret, boot.generation)
    holdings = mover.holdings(key)
    mapped = MappedSource(holdings.slots)
    keys = [writer.blob.key for writer in holdings.commit.writers]
    peers = [
        PeerBlobs(row["name"], row["address"], row["keys"], secret, boot.generation, row["run"])
        for row in (mover.holders(keys) if everywhere else holdings.peers)
    ]
    sources: list[Source] = [mapped, *peers, StoreSource(store)]
    if bucket := str(boot.config["checkpoint"]["bucket"]):
        sources.append(StoreSource(Second(lambda: open_store(bucket)), BUCKET))
    try:
        yield Checkpoint(Mixed(sources), holdings.commit)
    finally:
        for peer in peers:
            peer.close()
        with suppress(BufferError):  # an exception on its way up may still show a view
            mapped.close()

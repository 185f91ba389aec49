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
from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.fallback_store import BUCKET_SOURCE, LazyStore
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.sources import (
    BlobSource,
    FallbackReader,
    MappedSource,
    ReadStats,
    StoreSource,
)
from holdfast.core.format.manifest import Commit
from holdfast.core.sharding.boxes import Box
from holdfast.elastic.protocol.worker_spec import WorkerSpec
from holdfast.elastic.worker.reporter import AgentReporter
from holdfast.errors import CorruptError, HoldfastError, RunFolderError, StoreError
from holdfast.events import CheckpointRestored, SourceRejected
from holdfast.training.engine.build import TrainingSession
from holdfast.training.engine.replica_check import refuse_unequal_start
from holdfast.wire.secret import Secret
from holdfast.wire.store.location import open_store
from holdfast.wire.store.run_location import store_of_run
from holdfast.wire.store.run_store import MissingKeyError

logger = logging.getLogger(__name__)


class CorruptCheckpointError(HoldfastError):
    """No source has every byte of the checkpoint as it was written."""


_SOURCE_ERRORS = (CorruptError, MissingKeyError, RunFolderError, StoreError, PeerError)
"""Errors of a source that does not deliver: its copy is corrupt, missing, or out of reach."""


def restore(
    spec: WorkerSpec,
    session: TrainingSession,
    reporter: AgentReporter,
    secret: Secret | None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Load the state after `spec.start_step`, box by box, or make it from the seed.

    `check` is called meanwhile, and raises to end the restore. Raises CorruptCheckpointError, and
    HoldfastError if a source that may be intact cannot be reached.
    """
    key = spec.restore_key
    if key is None:
        engine = session.engine
        engine.initialise(session.config.seed)
        if session.config.task.name:  # the decoder's values are a function of the seed
            refuse_unequal_start(session.config, engine.groups, engine.state())
        session.task.check_first_loss(engine.objective, session.batches, engine.groups)
        return
    begun, opening, tally = time.monotonic(), 0.0, ReadStats()

    def read(everywhere: bool) -> None:
        nonlocal opening, tally
        with _open_checkpoint(spec, key, secret, everywhere) as checkpoint:
            opening, tally = time.monotonic() - begun, checkpoint.read_stats
            _load_with_retry(
                session, _BoxReader(checkpoint, spec.start_step, reporter, check), spec.run_folder
            )

    try:
        try:
            read(everywhere=False)
        except (*_SOURCE_ERRORS, CorruptCheckpointError) as error:
            if MappedSource.name not in {source for source, _, _ in tally.problems}:
                raise  # all who may have it were asked
            logger.warning("trying all peers too: %s", error)
            read(everywhere=True)
    except (CorruptError, MissingKeyError) as error:
        raise CorruptCheckpointError(str(error)) from error
    for source, blob, reason in dict.fromkeys(tally.problems):
        logger.warning("%s: %s; another source had it", source, reason)
        reporter.emit(SourceRejected(spec.rank, source, blob, reason, step=spec.start_step))
    reporter.emit(
        CheckpointRestored(
            spec.rank,
            key,
            sum(tally.bytes_by_source.values()),
            time.monotonic() - begun,
            {"open": opening, **tally.seconds_by_phase},
            dict(tally.bytes_by_source),
            step=spec.start_step,
        )
    )


def _load_with_retry(session: TrainingSession, boxes: _BoxReader, run_folder: str) -> None:
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
        raise CorruptCheckpointError(f"it cannot be read: {error}") from error
    except (RunFolderError, StoreError) as error:
        list_commits(store_of_run(run_folder))  # raises when it is out of reach
        raise CorruptCheckpointError(f"it cannot be read: {error}") from error


class _BoxReader:
    """Reads one box, or many in one pass, and reports meanwhile that this rank is alive."""

    def __init__(
        self, checkpoint: Checkpoint, step: int, reporter: AgentReporter, check: Callable[[], None]
    ) -> None:
        self._checkpoint, self._step, self._reporter = checkpoint, step, reporter
        self._check = check

    def __call__(self, box: Box, out: Tensor) -> None:
        self._keep_alive()
        self._checkpoint.read(box, _as_bytes(out))

    def many(self, wanted: Sequence[tuple[Box, Tensor]]) -> None:
        self._keep_alive()
        self._checkpoint.read_all(((box, _as_bytes(out)) for box, out in wanted), self._keep_alive)

    def _keep_alive(self) -> None:
        self._check()
        self._reporter.progress(self._step, "restore")


def _as_bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


@contextmanager
def _open_checkpoint(
    spec: WorkerSpec, key: str, secret: Secret | None, ask_all_peers: bool = False
) -> Iterator[Checkpoint]:
    """Open the checkpoint over all sources, cheapest first; memory is given back at the end.

    ask_all_peers: also use peers for blobs that this node's memory has. They are not asked before
    that is needed.
    """
    store = store_of_run(spec.run_folder)
    if not spec.mover_socket or secret is None:
        yield Checkpoint(store, Commit.from_bytes(store.get(key), key))
        return
    mover = MoverClient(spec.mover_socket, secret, spec.generation)
    holdings = mover.holdings(key)
    mapped = MappedSource(holdings.slots)
    keys = [writer.blob.key for writer in holdings.commit.writers]
    peers = [
        PeerBlobs(holder, secret, spec.generation)
        for holder in (mover.holders(keys) if ask_all_peers else holdings.peers)
    ]
    sources: list[BlobSource] = [mapped, *peers, StoreSource(store)]
    if bucket := str(spec.config["checkpoint"]["bucket"]):
        sources.append(StoreSource(LazyStore(lambda: open_store(bucket)), BUCKET_SOURCE))
    try:
        yield Checkpoint(FallbackReader(sources), holdings.commit)
    finally:
        for peer in peers:
            peer.close()
        with suppress(BufferError):  # an exception on its way up may still show a view
            mapped.close()

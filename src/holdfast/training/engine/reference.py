"""Reference log-probabilities of a run's samples: the ranks compute what no node has yet.

    agree     each node's first rank says which pieces its disk has
    share     a node that has a piece sends it to those that lack it
    compute   each replica computes a piece that no node has, and all nodes get it
    compare   all nodes must have the same bits

Each node writes what it receives (`data/stream/reference.py`). So a kill costs the pieces in work,
and a node that joins gets the stored bits. All of it is collective over the ranks of a generation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.data.stream.batch import Batches, Microbatch, ValidationSet
from holdfast.data.stream.reference import LOGPS, ReferencePiece, ReferenceStore
from holdfast.errors import ConfigError, DataError
from holdfast.events import ReferenceProgress
from holdfast.layout import Coordinate
from holdfast.parallel.comm.transport import exchange
from holdfast.training.engine.build import TrainingSession
from holdfast.training.engine.evaluate import TokenValidation, give_back_gathered
from holdfast.training.engine.objective import NextTokenObjective
from holdfast.training.engine.state import InitialBox
from holdfast.training.engine.task import DecoderTask, open_weights
from holdfast.training.engine.vote import reports_losses
from holdfast.training.objectives.protocol import Loss, Side

REPORT_SECONDS = 10.0  # between two lines about progress
IMPORTED = "imported"  # the checksum of weights that no folder has
_TAG_PRESENT, _TAG_VALUES, _TAG_DIGEST = 21, 22, 23
_WORD_BITS = 32  # pieces that a word says something of


@dataclass
class _KeptLogps:
    """An objective that keeps the log-probabilities of each microbatch, and has no loss."""

    kept: list[NDArray[np.float32]] = field(default_factory=list)  # [B, S] each
    names: tuple[str, ...] = ()
    needs: Set[str] = frozenset()
    needs_entropy: bool = False
    trains_entropy: bool = False

    def __call__(self, logps: Tensor, targets: Tensor, documents: Tensor, side: Side) -> Loss:
        self.kept.append(logps.detach().float().cpu().numpy())
        return Loss(logps.new_zeros((), dtype=torch.float64))

    def weigh(
        self,
        targets: NDArray[np.int64],
        documents: NDArray[np.int32],
        side: Mapping[str, NDArray[np.floating]],
    ) -> int:
        return 0


def fill_reference(
    session: TrainingSession,
    step: int,
    emit: Callable[[ReferenceProgress], None],
    on_progress: Callable[[], None],
) -> None:
    """Complete the run's reference log-probabilities, if it needs stored ones, and let its batches
    read them. Collective.

    step: the session's state is that after it. emit: is called on rank 0. Raises PeerLostError, and
    DataError if nodes have other bits.
    """
    batches = session.batches
    if not isinstance(batches, Batches) or batches.reference is None:
        return
    if batches.reference.dtype != LOGPS:  # of a teacher, which `holdfast data teach` has stored
        return
    work = _Filling(session, batches, batches.reference, step, emit, on_progress)
    work.run()
    batches.read_reference()
    samples = session.config.train.evaluate.samples
    session.evaluator.validation = session.task.validation(batches, samples)


@dataclass
class _Filling:
    session: TrainingSession
    batches: Batches
    store: ReferenceStore
    step: int
    emit: Callable[[ReferenceProgress], None]
    on_progress: Callable[[], None]

    def __post_init__(self) -> None:
        groups = self.session.groups
        self.groups, self.key = groups, self.store.folder.name
        nodes = groups.topology.nodes
        # By place in the control group: whether a rank is its node's first, and writes there.
        self.writers = [nodes.index(nodes[rank]) == rank for rank in groups.positions]
        self.is_writer = self.writers[groups.control.rank]
        self.begun = self.reported = time.monotonic()

    def run(self) -> None:
        present = self.agree()
        holders = [[w for w in present if present[w][n]] for n in range(len(self.store.pieces))]
        for number, having in enumerate(holders):
            if having and len(having) < len(present):
                self.share(number, having)
        missing = [number for number, having in enumerate(holders) if not having]
        if missing:
            self.report(len(holders) - len(missing))
            with self.reference_weights():
                self.compute(missing)
        digest = self.compare()
        if missing or self.step == 0:
            self.report(len(holders), digest)

    def agree(self) -> dict[int, list[bool]]:
        """Whether each writer has each piece, by its place."""
        count = len(self.store.pieces)
        words = -(-count // _WORD_BITS)
        mine = self.store.present() if self.is_writer else []
        said = [0] * (words if self.is_writer else 0)
        for number, has in enumerate(mine):
            said[number // _WORD_BITS] |= has << number % _WORD_BITS
        lengths = [words if writes else 0 for writes in self.writers]
        found = self.exchange(torch.tensor(said, dtype=torch.int64), lengths, _TAG_PRESENT)
        return {
            place: [
                bool(int(found[place][n // _WORD_BITS]) >> n % _WORD_BITS & 1) for n in range(count)
            ]
            for place, writes in enumerate(self.writers)
            if writes
        }

    def share(self, number: int, having: Sequence[int]) -> None:
        """Send a piece from the first that has it to those that lack it."""
        piece, me = self.store.pieces[number], self.groups.control.rank
        size = (piece.stop - piece.start) * self.store.length
        lengths = [0] * len(self.writers)
        lengths[having[0]] = _words(size)
        mine = _pack(self.store.read(number)) if me == having[0] else _pack(np.zeros(0, np.float32))
        found = self.exchange(mine, lengths, _TAG_VALUES)
        if self.is_writer and me not in having:
            self.store.write(number, _unpack(found[having[0]], (-1, self.store.length), size))

    def compute(self, missing: Sequence[int]) -> None:
        replicas = self.groups.replica_count
        done = len(self.store.pieces) - len(missing)
        for at in range(0, len(missing), replicas):
            chosen = missing[at : at + replicas]
            mine = self.groups.coordinate.replica
            found = self.compute_piece(chosen[mine]) if mine < len(chosen) else None
            self.collect(chosen, found)
            done += len(chosen)
            if time.monotonic() - self.reported >= REPORT_SECONDS:
                self.report(done)

    def compute_piece(self, number: int) -> NDArray[np.float32] | None:
        """[microbatches, B / shards, S], of this rank's part of each microbatch; None on ranks
        without a head."""
        session, place = self.session, self.groups.coordinate
        parts = _microbatches(self.batches, self.store.pieces[number])
        source = TokenValidation(ValidationSet(parts, 0, 1.0), lambda batch: 0)
        part, of = place.dp_shard, self.groups.degree("dp_shard")
        loaded = [source.part(i, part, of, session.device) for i in range(len(parts))]
        objective, kept = cast(NextTokenObjective, session.engine.objective), _KeptLogps()
        before, objective.loss = objective.loss, kept
        try:
            with torch.no_grad():
                session.engine.executor.evaluate(loaded, self.on_progress)
            give_back_gathered(objective)
        finally:
            objective.loss = before
        if not self.speaks(place, self.groups.control.rank):
            return None
        size = -(-self.batches.microbatch_size // of)
        out = np.zeros((len(parts), size, self.store.length), dtype=np.float32)
        for row, values in zip(out, kept.kept, strict=True):
            row[: len(values)] = values
        return out

    def speaks(self, place: Coordinate, control_rank: int) -> bool:
        rank = self.groups.positions[control_rank]
        return reports_losses(self.groups.topology.replica_of(rank), place)

    def collect(self, chosen: Sequence[int], mine: NDArray[np.float32] | None) -> None:
        """Let each node write the pieces that the replicas have computed."""
        topology, size, lengths = self.groups.topology, self.batches.microbatch_size, list[int]()
        shapes: list[tuple[int, int, int]] = []
        for place, rank in enumerate(self.groups.positions):
            at, replica = topology.coordinate(rank), topology.replica_of(rank)
            shape = 0, 0, 0
            if at.replica < len(chosen) and self.speaks(at, place):
                piece = self.store.pieces[chosen[at.replica]]
                count, rows = (
                    -(-(piece.stop - piece.start) // size),
                    -(-size // replica.degree("dp_shard")),
                )
                shape = count, rows, self.store.length
            shapes.append(shape)
            lengths.append(_words(int(np.prod(shape))))
        packed = _pack(np.zeros(0, np.float32) if mine is None else mine)
        found = self.exchange(packed, lengths, _TAG_VALUES)
        if not self.is_writer:
            return
        for number in range(len(chosen)):
            shards = [
                _unpack(found[place], shapes[place], int(np.prod(shapes[place])))
                for place, rank in enumerate(self.groups.positions)
                if topology.coordinate(rank).replica == number and lengths[place]
            ]
            piece = self.store.pieces[chosen[number]]
            samples: list[NDArray[np.float32]] = []
            for index, start in enumerate(range(piece.start, piece.stop, size)):
                fed = min(size, piece.stop - start)
                part = -(-fed // len(shards))
                samples.append(np.concatenate([shard[index][:part] for shard in shards])[:fed])
            self.store.write(chosen[number], np.concatenate(samples))

    def compare(self) -> str:
        """The digest of all pieces, the same on each node. Raises DataError."""
        digest = self.store.finish() if self.is_writer else ""
        words = [int(digest[at : at + 8], 16) for at in range(0, len(digest), 8)]
        lengths = [4 if writes else 0 for writes in self.writers]
        found = self.exchange(torch.tensor(words, dtype=torch.int64), lengths, _TAG_DIGEST)
        said = {
            tuple(one.tolist()) for one, writes in zip(found, self.writers, strict=True) if writes
        }
        if len(said) > 1:
            raise DataError(
                "the nodes have different reference log-probabilities",
                where=str(self.store.folder),
                remedy="remove this folder on all nodes but one",
            )
        return "".join(f"{word:08x}" for word in said.pop())

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        """Compute with the reference's weights, and put the run's state back."""
        engine, value = self.session.engine, self.other_weights()
        if value is None:
            yield
            return
        masters = engine.parameters.master_tensors
        own = [tensor.detach().to("cpu", copy=True) for tensor in masters]
        torn, engine.status.is_torn = engine.status.is_torn, True  # until the state is back
        engine.parameters.fill(value)
        yield
        with torch.no_grad():
            for tensor, before in zip(masters, own, strict=True):
                tensor.copy_(before)
        engine.parameters.refresh()
        engine.status.is_torn = torn

    def other_weights(self) -> InitialBox | None:
        """What gives the reference's weights; None: the state has them. Raises UserError."""
        config = self.session.config
        named = config.objective.reference
        if named.model:
            key = "objective.reference.model"
            tensors = open_weights(config.model, Path(named.model), named.checksum, key)
            return lambda row, box: tensors.box(row.name, box.offsets, box.lengths)
        if self.step == 0:
            return None
        if config.model.weights_checksum == IMPORTED:
            raise ConfigError(
                "the reference log-probabilities of this run are lost, and so are the imported "
                "weights that they follow from",
                where=str(self.store.folder),
                remedy="put the folder back, or begin another run",
            )
        return cast(DecoderTask, self.session.task).initial_values(config.seed)

    def report(self, done: int, digest: str = "") -> None:
        self.reported = time.monotonic()
        if self.groups.rank == 0:
            count, seconds = len(self.store.pieces), self.reported - self.begun
            self.emit(ReferenceProgress(self.key, done, count, seconds, digest, step=self.step))

    def exchange(self, record: Tensor, lengths: list[int], tag: int) -> list[Tensor]:
        self.on_progress()
        return exchange(self.groups.control, record, lengths, tag)


def _microbatches(batches: Batches, piece: ReferencePiece) -> list[Microbatch]:
    """The samples of a piece as passes of the model, as large as those of training."""
    size = batches.microbatch_size
    return [
        batches.samples_of(
            ReferencePiece(piece.split, piece.source, at, min(at + size, piece.stop))
        )
        for at in range(piece.start, piece.stop, size)
    ]


def _words(floats: int) -> int:
    return -(-floats // 2)


def _pack(values: NDArray[np.float32]) -> Tensor:
    """Any shape -> int64 words that hold two float32 each."""
    flat = np.zeros(2 * _words(values.size), dtype=np.float32)
    flat[: values.size] = values.ravel()
    return torch.from_numpy(flat.view(np.int64))


def _unpack(words: Tensor, shape: tuple[int, ...], size: int) -> NDArray[np.float32]:
    """The inverse of `_pack`."""
    return words.numpy().view(np.float32)[:size].reshape(shape)

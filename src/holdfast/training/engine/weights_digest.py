"""A digest of the weights that any other layout can compute again.

Each rank hashes what it owns of the weights (`core/sharding/ownership.py`, over the rows of the
parameters alone). So every byte is hashed once, and the ranks share the work. A reader that holds
the same weights cuts them as the recorded topology does, and gets the same digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from holdfast.config.run import RunConfig
from holdfast.core.sharding.boxes import Box, whole_box
from holdfast.core.sharding.ownership import Ownership
from holdfast.core.sharding.run_table import run_state_table
from holdfast.core.sharding.state_table import MODEL_PREFIX, StateTable
from holdfast.events import WeightsDigest
from holdfast.layout import Topology
from holdfast.training.engine.replica_check import box_bytes
from holdfast.training.engine.state import LocalTensor


def weight_rows(config: RunConfig) -> StateTable:
    """Return the rows of the state table that are weights."""
    return tuple(row for row in run_state_table(config) if row.name.startswith(MODEL_PREFIX))


def digest_of_boxes(tensors: Mapping[str, LocalTensor], boxes: Iterable[Box]) -> str:
    """Return the SHA-256 of these boxes, one after another: name, place and bytes of each."""
    found = hashlib.sha256()
    for box in boxes:
        tensor = tensors[box.name]
        dtype = str(tensor.tensor.dtype).removeprefix("torch.")
        place = f"{box.name} {dtype} {list(box.offsets)} {list(box.lengths)}\n"
        found.update(place.encode())
        found.update(box_bytes(tensor, box))
    return found.hexdigest()


def digest_of_weights(config: RunConfig, state: Iterable[LocalTensor]) -> str:
    """Return the SHA-256 of all weights, of a rank that holds all of them."""
    boxes = [whole_box(row.name, row.shape) for row in weight_rows(config)]
    return digest_of_boxes({local.name: local for local in state}, boxes)


class WeightsDigester:
    """Hashes the weights of the ranks of one topology."""

    def __init__(self, config: RunConfig, topology: Topology) -> None:
        self.topology = topology
        self._every = config.train.digest_every
        self._ownership = Ownership(topology, weight_rows(config))

    def digest(self, rank: int, state: Iterable[LocalTensor]) -> str:
        """Return the digest of what `rank` owns, of a state that has it; "" if it owns nothing."""
        boxes = self._ownership.boxes(rank)
        return digest_of_boxes({local.name: local for local in state}, boxes) if boxes else ""

    @property
    def owners(self) -> frozenset[int]:
        """The ranks that own a part of the weights."""
        return frozenset(rank for rank, boxes in self._ownership.by_rank() if boxes)

    def event(self, rank: int, step: int, state: Iterable[LocalTensor]) -> WeightsDigest | None:
        """Return what the journal gets of the weights after `step`; None if none is due."""
        if not self._every or step % self._every:
            return None
        digest = self.digest(rank, state)
        return WeightsDigest(rank, digest, step=step) if digest else None

"""Validation: mean loss and bits per byte, the same number for any number of ranks.

Validation samples are fixed. Their microbatches are dealt over the replicas like those of a
step. Each gives a loss sum, and the sums are combined in float64 in tree order. Inside a replica
each shard computes its rows of a microbatch, padded with masked rows to equal parts. The reason:
the shards of one replica must run the same forward together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from holdfast.core.sharding.reduction_tree import ReductionTree, deal
from holdfast.parallel.process_groups import ProcessGroups
from holdfast.train.executors import Executor
from holdfast.train.objective import IGNORED_TARGET
from holdfast.train.vote import gather_losses, reports_losses


class HostMicrobatch(Protocol):
    """Samples as numpy arrays: inputs, targets [B, S]; documents [B, S] or None."""

    @property
    def inputs(self) -> NDArray[np.int64]: ...

    @property
    def targets(self) -> NDArray[np.int64]: ...

    @property
    def documents(self) -> NDArray[np.int32] | None: ...


class ValidationSamples(Protocol):
    """`data.batch.ValidationSet` is one."""

    @property
    def microbatches(self) -> Sequence[HostMicrobatch]: ...

    @property
    def tokens(self) -> int: ...

    def bits_per_byte(self, nats: float) -> float: ...


@dataclass(frozen=True)
class Evaluation:
    """loss: nats per token."""

    loss: float
    bits_per_byte: float
    tokens: int


@dataclass(frozen=True)
class _RankRows:
    """One rank's part of a validation microbatch."""

    inputs: Tensor
    targets: Tensor
    documents: Tensor | None


class Evaluator:
    """Computes the validation loss of a model; collective over all ranks."""

    def __init__(
        self,
        objective: nn.Module,
        executor: Executor,
        groups: ProcessGroups,
        validation: ValidationSamples,
        device: torch.device,
    ):
        self._objective, self._executor = objective, executor
        self._groups, self._device = groups, device
        self._validation = validation

    def regroup(self, groups: ProcessGroups) -> None:
        """Continue among other replicas."""
        self._groups = groups

    def run(self, on_progress: Callable[[], None] = lambda: None) -> Evaluation | None:
        """None when there is no validation text. `on_progress` is called before each microbatch.

        Raises PeerLostError.
        """
        batches = self._validation.microbatches
        if not batches or not self._validation.tokens:
            return None
        shares = deal(len(batches), self._groups.replica_count)
        own = shares[self._groups.coordinate.replica]
        with torch.no_grad():
            found = self._executor.evaluate(
                [self._rows_on_rank(batches[index]) for index in own], on_progress
            )
        spoken = reports_losses(self._groups.replica, self._groups.coordinate)
        losses = [float(loss) for loss in found] if spoken else []
        self._release()
        total = ReductionTree(len(batches)).sum(gather_losses(self._groups, shares, losses))
        tokens = self._validation.tokens
        return Evaluation(total / tokens, self._validation.bits_per_byte(total), tokens)

    def _rows_on_rank(self, batch: HostMicrobatch) -> _RankRows:
        part, parts = self._groups.coordinate.dp_shard, self._groups.degree("dp_shard")
        inputs = self._move(rows(batch.inputs, part, parts, 0))
        targets = self._move(rows(batch.targets, part, parts, IGNORED_TARGET))
        documents = None
        if batch.documents is not None:
            documents = self._move(rows(batch.documents, part, parts, 0))
        return _RankRows(inputs, targets, documents)

    def _move(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _release(self) -> None:
        """Without a backward nothing tells FSDP2 to give gathered parameters back."""
        for module in self._objective.modules():
            reshard = getattr(module, "reshard", None)  # its class is not imported for nothing
            if reshard is not None:
                reshard()


def rows(array: NDArray[Any], part: int, parts: int, pad: int) -> NDArray[Any]:
    """Part `part` of `parts` equal ones, padded at the end.  [B, S] -> [ceil(B / parts), S]"""
    size = -(-array.shape[0] // parts)
    taken = array[part * size : (part + 1) * size]
    if len(taken) == size:
        return np.ascontiguousarray(taken)
    padding = np.full((size - len(taken), array.shape[1]), pad, dtype=array.dtype)
    return np.concatenate((taken, padding))

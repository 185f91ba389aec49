"""Validation: mean loss and bits per byte, the same number for any number of ranks.

Validation samples are fixed. Their microbatches are dealt over the replicas like those of a
step. Each gives a loss sum, and the sums are combined in float64 in tree order. Inside a replica
each shard computes its rows of a microbatch, padded with masked rows to equal parts. The reason:
the shards of one replica must run the same forward together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from holdfast.core.sharding.reduction_tree import ReductionTree, deal
from holdfast.core.weights import shortest
from holdfast.data.stream.batch import Microbatch, ValidationSet
from holdfast.data.stream.loader import TensorMicrobatch
from holdfast.events import Evaluated
from holdfast.parallel.axes.process_groups import ProcessGroups
from holdfast.training.engine.executors import Executor
from holdfast.training.engine.objective import IGNORED_TARGET
from holdfast.training.engine.vote import gather_losses, reports_losses
from holdfast.training.objectives.registry import means_of, sum_names_of


class Validation(Protocol):
    """Fixed samples in microbatches, as the evaluator asks for them.

    tokens: the divisor of the loss; None: the sum of the weights of all parts.
    """

    @property
    def microbatches(self) -> int: ...

    @property
    def tokens(self) -> float | None: ...

    def part(self, index: int, part: int, parts: int, device: torch.device) -> Any:
        """Part `part` of `parts` of a microbatch, as the executor takes it. Its `tokens` is its
        weight, where the divisor is not known."""
        ...

    def bits_per_byte(self, nats: float) -> float | None:
        """Of the loss summed over all samples; None where there is no text."""
        ...


@dataclass(frozen=True)
class Evaluation:
    """loss: nats per token, or as the task counts. bits_per_byte: None where there is no text."""

    loss: float
    bits_per_byte: float | None
    tokens: float
    metrics: Mapping[str, float] = field(default_factory=dict)  # means of an objective's sums

    def event(self, step: int, seconds: float) -> Evaluated:
        """The journal's event."""
        said = self.loss, self.bits_per_byte, self.tokens, seconds, dict(self.metrics)
        return Evaluated(*said, step=step)


class TokenValidation:
    """Validation text of the built-in decoder. weigh: counts what a microbatch weighs, if an
    objective does not count targets. The loss is then none of text."""

    def __init__(
        self, samples: ValidationSet, weigh: Callable[[Microbatch], float] | None = None
    ) -> None:
        self._samples, self._is_text = samples, weigh is None
        self.tokens = samples.tokens
        if weigh is not None:
            self.tokens = shortest(sum(weigh(batch) for batch in samples.microbatches))

    @property
    def microbatches(self) -> int:
        return len(self._samples.microbatches)

    def part(self, index: int, part: int, parts: int, device: torch.device) -> TensorMicrobatch:
        batch = self._samples.microbatches[index]

        def moved(array: NDArray[Any], pad: int) -> Tensor:
            return torch.from_numpy(rows(array, part, parts, pad)).to(device)

        documents = None if batch.documents is None else moved(batch.documents, 0)
        inputs = moved(batch.inputs, 0)
        targets = moved(batch.targets, IGNORED_TARGET)
        side = {name: moved(array, 0) for name, array in batch.side.items()}
        return TensorMicrobatch(inputs, targets, documents, [], 0.0, side=side)

    def bits_per_byte(self, nats: float) -> float | None:
        return self._samples.bits_per_byte(nats) if self._is_text else None


@dataclass(eq=False)
class Evaluator:
    """Computes the validation loss of a model; collective over all ranks."""

    objective: nn.Module
    executor: Executor
    groups: ProcessGroups
    validation: Validation
    device: torch.device

    def regroup(self, groups: ProcessGroups) -> None:
        """Continue among other replicas."""
        self.groups = groups

    def run(self, on_progress: Callable[[], None] = lambda: None) -> Evaluation | None:
        """None without validation samples. `on_progress` is called before each microbatch.

        Raises PeerLostError.
        """
        count, known = self.validation.microbatches, self.validation.tokens
        if not count or known == 0:
            return None
        shares = deal(count, self.groups.replica_count)
        part, parts = self.groups.coordinate.dp_shard, self.groups.degree("dp_shard")
        batches = [
            self.validation.part(index, part, parts, self.device)
            for index in shares[self.groups.coordinate.replica]
        ]
        with torch.no_grad():
            found = self.executor.evaluate(batches, on_progress)
        spoken = reports_losses(self.groups.replica, self.groups.coordinate)
        losses = [number for loss in found for number in loss.flatten().tolist()] if spoken else []
        give_back_gathered(self.objective)
        tree, names = ReductionTree(count), sum_names_of(self.objective)
        by_leaf, sums = gather_losses(self.groups, shares, losses, 1 + 2 * len(names))
        total = tree.sum(by_leaf)
        if known is None:
            weights = [float(batch.tokens) for batch in batches] if spoken else []
            known = shortest(tree.sum(gather_losses(self.groups, shares, weights)[0]))
        if not known:
            return None
        bits = self.validation.bits_per_byte(total)
        return Evaluation(total / known, bits, known, means_of(names, sums))


def give_back_gathered(objective: nn.Module) -> None:
    """Give back the parameters that a forward has gathered. Without a backward nothing tells FSDP2
    to do so."""
    for module in objective.modules():
        reshard = getattr(module, "reshard", None)  # its class is not imported for nothing
        if reshard is not None:
            reshard()


def rows(array: NDArray[Any], part: int, parts: int, pad: int) -> NDArray[Any]:
    """Part `part` of `parts` equal ones, padded at the end.  [B, ...] -> [ceil(B / parts), ...]"""
    size = -(-array.shape[0] // parts)
    taken = array[part * size : (part + 1) * size]
    if len(taken) == size:
        return np.ascontiguousarray(taken)
    padding = np.full((size - len(taken), *array.shape[1:]), pad, dtype=array.dtype)
    return np.concatenate((taken, padding))

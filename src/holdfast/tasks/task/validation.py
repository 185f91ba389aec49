"""A task's validation samples: its own dataset's, or the validation split of the prepared tokens.

The random numbers of a pass belong to (run's seed, microbatch), so a validation is the same number
each time. The shards of a replica must run the same forward together. So a shard without a sample
of its own computes one that counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from holdfast.core.seeds import key_seed
from holdfast.data.stream.batch import ValidationSet
from holdfast.errors import TaskError
from holdfast.tasks.task.batches import (
    TaskMicrobatch,
    collated,
    sample_count,
    tensors_of,
)
from holdfast.tasks.task.loading import user_code
from holdfast.tasks.task.task import Batch, Collate, Samples, Task
from holdfast.training.engine.evaluate import rows
from holdfast.training.engine.objective import IGNORED_TARGET

_PADS = {"inputs": 0, "targets": IGNORED_TARGET, "documents": 0, "weights": 0}


class TaskValidation:
    """Samples that are evenly spread over a dataset, in microbatches; none without one."""

    tokens: int | None = None  # what `weight` says of each part

    def __init__(
        self,
        samples: Samples | None,
        collate: Collate,
        weight: Callable[[Batch], float],
        count: int,
        microbatch_size: int,
        seed: int,
    ) -> None:
        """count: samples at most."""
        self._samples, self._collate, self._weight = samples, collate, weight
        self._size, self._seed = microbatch_size, seed
        total = 0 if samples is None else sample_count(samples, "validation()")
        count = min(count, total)
        self._chosen = [number * total // count for number in range(count)]

    @property
    def microbatches(self) -> int:
        return -(-len(self._chosen) // self._size)

    def part(self, index: int, part: int, parts: int, device: torch.device) -> TaskMicrobatch:
        """Part `part` of `parts` of a microbatch. Raises TaskError."""
        assert self._samples is not None, "there are microbatches"
        whole = self._chosen[index * self._size : (index + 1) * self._size]
        size = -(-len(whole) // parts)
        own = whole[part * size : (part + 1) * size]
        batch = collated(self._collate, self._samples, own or whole[:1])
        weight = self._weight(batch) if own else 0
        key = key_seed(self._seed, "validation", index, part, parts)
        read = TaskMicrobatch(batch, key, [], weight, counts=bool(own))
        return read.map(lambda tensor: tensor.to(device))

    def bits_per_byte(self, nats: float) -> None:
        """The data need not be text."""


class TokenTaskValidation:
    """The validation split of the prepared tokens."""

    def __init__(self, samples: ValidationSet, seed: int, is_weighted: bool) -> None:
        self._samples, self._seed, self.tokens = samples, seed, samples.tokens
        self._is_weighted = is_weighted

    @property
    def microbatches(self) -> int:
        return len(self._samples.microbatches)

    def part(self, index: int, part: int, parts: int, device: torch.device) -> TaskMicrobatch:
        """Part `part` of `parts` of a microbatch, padded with rows without loss."""
        whole = tensors_of(self._samples.microbatches[index], self._is_weighted)
        cut = {
            name: torch.from_numpy(rows(tensor.numpy(), part, parts, _PADS[name]))
            for name, tensor in whole.items()
        }
        key = key_seed(self._seed, "validation", index, part, parts)
        return TaskMicrobatch(cut, key, [], 0).map(lambda tensor: tensor.to(device))

    def bits_per_byte(self, nats: float) -> float:
        """As the built-in decoder's."""
        return self._samples.bits_per_byte(nats)


def open_validation(task: Task) -> Samples | None:
    """Raises TaskError."""
    with user_code("validation() failed"):
        samples = task.validation()
    if samples is not None and sample_count(samples, "validation()") < 1:
        raise TaskError("validation() has no samples", remedy="return None for none")
    return samples

"""The prepared tokens of a run as a task's batches: `inputs`, `targets` and perhaps `documents`.

Order, ledger and hashes are those of the built-in decoder (`data/stream/batch.py`), so every check
of the data applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.config.run import RunConfig
from holdfast.core.data.skips import Skips
from holdfast.core.data.target_weights import target_ids, target_weights, with_weights
from holdfast.core.seeds import key_seed
from holdfast.data.stream.batch import Batches, Microbatch, fed_hash
from holdfast.data.stream.dataset import Dataset
from holdfast.tasks.task.batches import TaskMicrobatch


class TokenBatches:
    """Every batch of a task that trains on prepared tokens, by step number."""

    def __init__(self, config: RunConfig, dataset: Dataset) -> None:
        self.tokens = Batches(dataset, config.data, config.train, config.seed)
        self.microbatch_size, self.schedule = self.tokens.microbatch_size, self.tokens.schedule
        self._seed, self._is_weighted = config.seed, config.data.chat.weights

    @property
    def skips(self) -> Skips:
        return self.tokens.skips

    @skips.setter
    def skips(self, skips: Skips) -> None:
        self.tokens.skips = skips

    def positions(self, step: int, index: int, part: int = 0, parts: int = 1) -> tuple[int, int]:
        """As `Batches.positions`."""
        return self.tokens.positions(step, index, part, parts)

    def microbatch(self, step: int, index: int, part: int = 0, parts: int = 1) -> TaskMicrobatch:
        """As `Batches.microbatch`. A skipped one has no tensors."""
        read = self.tokens.microbatch(step, index, part, parts)
        is_skipped = self.skips.reason(step, index)
        key = key_seed(self._seed, "forward", step, index, part, parts)
        tensors: Mapping[str, Tensor] = {} if is_skipped else tensors_of(read, self._is_weighted)
        return TaskMicrobatch(tensors, key, read.entries, read.tokens)

    def read_samples(self, start: int, stop: int, times: int = 1) -> Mapping[str, Tensor]:
        """The samples at positions [start, stop), `times` after each other."""
        read = tensors_of(self.tokens.read_samples(start, stop), self._is_weighted)
        return {name: tensor.repeat(times, 1) for name, tensor in read.items()}

    def digest(self, batch: TaskMicrobatch) -> str:
        """The ledger hash of what is handed over."""
        if not batch.tensors:
            return str(batch.entries[0]["hash"])
        targets = batch.tensors["targets"].numpy()
        if (weights := batch.tensors.get("weights")) is not None:
            targets = with_weights(targets, weights.numpy())
        return fed_hash(batch.tensors["inputs"].numpy(), targets)


def tensors_of(read: Microbatch, is_weighted: bool) -> Mapping[str, Tensor]:
    """inputs, targets: int64 [B, S]; documents: int32 [B, S], if they must not see each other;
    weights: float32 [B, S], with `data.chat.weights`."""
    found: dict[str, NDArray[Any]] = {"inputs": read.inputs, "targets": target_ids(read.targets)}
    if is_weighted:
        found["weights"] = target_weights(read.targets)
    if read.documents is not None:
        found["documents"] = read.documents
    return {name: torch.from_numpy(np.ascontiguousarray(rows)) for name, rows in found.items()}

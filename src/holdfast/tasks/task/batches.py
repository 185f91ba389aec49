"""Every batch of a task's run, by step number: the user's samples in the run's order.

The order, the positions and the ledger are those of token data (`data/stream/batch.py`): a sample
is an index of the user's dataset. A skipped microbatch is not read. It has no tensors, and its loss
and its gradient are zero.

A validation has the task's own dataset, or the validation split of the prepared tokens. The random
numbers of a pass belong to (run's seed, microbatch), so a validation is the same number each time.
The shards of a replica must run the same forward together. So a shard without a sample of its own
computes one that counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader
from xxhash import xxh3_64

from holdfast.config.run import RunConfig
from holdfast.core.data.sample_order import BatchSchedule, SampleOrder
from holdfast.core.data.skips import Skips
from holdfast.core.data.target_weights import target_ids, target_weights, with_weights
from holdfast.core.devices import device_kind
from holdfast.core.seeds import key_seed
from holdfast.core.weights import read_weight
from holdfast.data.stream.batch import FEATURES, Batches, Microbatch, ValidationSet, fed_hash
from holdfast.data.stream.dataset import Dataset
from holdfast.data.stream.loader import StepLoader
from holdfast.errors import START_OVER, TaskError
from holdfast.tasks.task.loading import user_code
from holdfast.tasks.task.task import Batch, Collate, Samples, Task
from holdfast.training.engine.evaluate import rows
from holdfast.training.engine.objective import IGNORED_TARGET

SOURCE = "task"
"""The name of the data in the ledger."""


@dataclass(frozen=True)
class TaskMicrobatch:
    """A logical microbatch, or a rank's part of it; of training, or of a validation."""

    tensors: Mapping[str, Tensor]  # empty for one that is skipped
    key: int  # seed of the random numbers of its forward pass
    entries: list[dict[str, Any]]  # of the ledger; none in a validation
    tokens: float  # its weight
    counts: bool = True  # False for one that only keeps the shards of a validation in step

    @property
    def arguments(self) -> tuple[Mapping[str, Tensor], int]:
        """What the objective takes."""
        return self.tensors, self.key

    def map(self, change: Callable[[Tensor], Tensor]) -> TaskMicrobatch:
        """Return the same with changed tensors."""
        return replace(self, tensors={name: change(t) for name, t in self.tensors.items()})


@dataclass(frozen=True)
class TaskData:
    """The names of the data, for the audit."""

    version: str
    source_names: tuple[str, ...] = (SOURCE,)

    def is_version(self, version: str) -> bool:
        return version == self.version


class TaskBatches:
    """The batches of a task."""

    def __init__(self, task: Task, config: RunConfig, skips: Skips | None = None) -> None:
        self.skips = skips or Skips()
        self.microbatch_size = config.train.microbatch_size
        stages = [(stage.from_step, stage.batch_size) for stage in config.train.batch_warmup]
        self.schedule = BatchSchedule(config.train.batch_size, stages)
        self._task, self._seed, self._expected = task, config.seed, config.task.samples
        opened = open_samples(task)
        if opened is None:
            raise TaskError(
                "data() returns None, and had samples before",
                remedy="return the data that the run was begun with",
            )
        self._samples, version = opened
        if version != config.task.data:
            raise TaskError(
                f"the data's version was {config.task.data!r} and is now {version!r}",
                remedy=f"go back to that data, or {START_OVER}",
            )
        self._check_length()
        self.order = SampleOrder(config.seed, [self._expected], [1.0])
        self.dataset = TaskData(version)

    def positions(self, step: int, index: int, part: int = 0, parts: int = 1) -> tuple[int, int]:
        """Positions [start, stop) of part `part` of `parts` of microbatch `index` of a step."""
        return self.schedule.share(self.microbatch_size, step, index, part, parts)

    def microbatch(self, step: int, index: int, part: int = 0, parts: int = 1) -> TaskMicrobatch:
        """Microbatch `index` of a step, or the `part`-th of `parts` equal shares of its samples.
        Raises TaskError."""
        start, stop = self.positions(step, index, part, parts)
        why = self.skips.reason(step, index)
        tensors: Mapping[str, Tensor] = {} if why else self.read_samples(start, stop)
        weight = batch_weight(self._task, tensors) if tensors else 0
        entry = {
            "microbatch": index,
            "source": SOURCE,
            "start": start,
            "stop": stop,
            "hash": tensor_hash(tensors),
            "skipped": why,
        }
        key = key_seed(self._seed, "forward", step, index, part, parts)
        return TaskMicrobatch(tensors, key, [entry], weight)

    def read_samples(self, start: int, stop: int, times: int = 1) -> Mapping[str, Tensor]:
        """The batch of the samples at positions [start, stop), `times` after each other."""
        self._check_length()
        _, _, indices = self.order.places(start, stop)
        return collated(self._task.collate, self._samples, indices.tolist(), times)

    def hash_of(self, start: int, stop: int) -> str:
        """The ledger hash that feeding positions [start, stop) must give."""
        return tensor_hash(self.read_samples(start, stop))

    def blank_hash(self, samples: int) -> str:
        """The ledger hash of skipped samples."""
        return tensor_hash({})

    def digest(self, batch: TaskMicrobatch) -> str:
        """The ledger hash of what is handed over."""
        return tensor_hash(batch.tensors)

    def _check_length(self) -> None:
        if (found := sample_count(self._samples, "the data")) != self._expected:
            raise TaskError(
                f"the data had {self._expected} samples and now has {found}",
                remedy="let the length of a dataset stay, or give new data a new version",
            )


def open_samples(task: Task) -> tuple[Samples, str] | None:
    """The task's samples and their version; None for the prepared tokens. Raises TaskError."""
    with user_code("data() failed"):
        samples = task.data()
        if samples is None:
            return None
        version = getattr(samples, "version", None)
    if not isinstance(version, str) or not version:
        raise TaskError(
            f"the data ({type(samples).__name__}) has no version",
            remedy="give it an attribute `version`, a text that changes with its content",
        )
    if sample_count(samples, "the data") < 1:
        raise TaskError("the data has no samples", remedy="give it one")
    return samples, version


def sample_count(samples: Any, what: str) -> int:
    """The length. Raises TaskError for data that can only be iterated over. what: the subject."""
    if isinstance(samples, DataLoader):
        raise TaskError(
            f"{what} is a DataLoader, which has an order and batches of its own",
            remedy="give the dataset that it loads, and its collate_fn as collate",
        )
    if not hasattr(samples, "__len__") or not hasattr(samples, "__getitem__"):
        raise TaskError(
            f"{what} ({type(samples).__name__}) has no length and no index, so a step cannot ask "
            "for its samples",
            remedy="write it to shards first, and read them by number (docs/guide/python.md)",
        )
    with user_code(f"the length of {what} cannot be read"):
        count: int = len(samples)
    return count


def collated(
    collate: Collate, samples: Samples, indices: Sequence[int], times: int = 1
) -> Mapping[str, Tensor]:
    """The batch of these samples, `times` after each other. Raises TaskError."""
    items: list[Mapping[str, Any]] = []
    for index in indices:
        with user_code(f"sample {index} cannot be read"):
            items.append(samples[index])
    with user_code(f"collate() failed for samples {_shortened(indices)}"):
        batch: Any = collate(items * times)
    if not isinstance(batch, Mapping):
        kind = type(batch).__name__
        raise TaskError(
            f"collate() returned {kind}, no dict of tensors", remedy="return tensors by name"
        )
    if other := [name for name, value in batch.items() if not isinstance(value, Tensor)]:
        kind = type(batch[other[0]]).__name__
        raise TaskError(
            f"a batch holds tensors alone, and its {other[0]!r} is {kind}",
            remedy="leave it out in collate(), or make a tensor of it",
        )
    if not batch:
        raise TaskError("a batch has no tensors", remedy="return one in collate()")
    found: Mapping[str, Tensor] = batch
    return found


def _shortened(indices: Sequence[int]) -> str:
    most = 8
    shown = ", ".join(map(str, indices[:most]))
    return shown if len(indices) <= most else f"{shown}, ..."


def batch_weight(task: Task, batch: Mapping[str, Tensor]) -> float:
    """What the batch adds to the divisor. Raises TaskError."""
    with user_code("weight() failed"):
        given = task.weight(batch)
    weight = read_weight(given)
    if weight is None:
        raise TaskError(
            f"weight() returned {given!r}",
            remedy="return a number from 0 on: the samples or tokens of the batch, or the sum of "
            "their weights",
        )
    return weight


def tensor_hash(batch: Mapping[str, Tensor]) -> str:
    """xxh3-64 of names, dtypes, shapes and bytes, by name; "" for no tensors."""
    if not batch:
        return ""
    state = xxh3_64()
    for name in sorted(batch):
        tensor = batch[name].detach().contiguous()
        state.update(f"{name} {tensor.dtype} {list(tensor.shape)}\0".encode())
        state.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


class TokenBatches:
    """The prepared tokens of a run as batches: `inputs`, `targets` and perhaps `documents`.

    Order, ledger and hashes are those of the built-in decoder, so every check of the data applies.
    """

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
        return {n: tensor.repeat(times, *[1] * (tensor.dim() - 1)) for n, tensor in read.items()}

    def digest(self, batch: TaskMicrobatch) -> str:
        """The ledger hash of what is handed over."""
        if not batch.tensors:
            return str(batch.entries[0]["hash"])
        targets = batch.tensors["targets"].numpy()
        if (weights := batch.tensors.get("weights")) is not None:
            targets = with_weights(targets, weights.numpy())
        side = {n: batch.tensors[n].numpy() for n in (FEATURES,) if n in batch.tensors}
        return fed_hash(batch.tensors["inputs"].numpy(), targets, side)


def tensors_of(read: Microbatch, is_weighted: bool) -> Mapping[str, Tensor]:
    """inputs, targets: int64 [B, S]; documents: int32 [B, S], if they must not see each other;
    weights: float32 [B, S], with `data.chat.weights`.

    features: [B, rows, values], with `data.features`."""
    found: dict[str, NDArray[Any]] = {"inputs": read.inputs, "targets": target_ids(read.targets)}
    if is_weighted:
        found["weights"] = target_weights(read.targets)
    if read.documents is not None:
        found["documents"] = read.documents
    if FEATURES in read.side:
        found[FEATURES] = read.side[FEATURES]
    return {name: torch.from_numpy(np.ascontiguousarray(rows)) for name, rows in found.items()}


BatchesOfTask = TaskBatches | TokenBatches
"""A task's own data, or the prepared tokens."""


class TaskLoader(StepLoader[TaskMicrobatch]):
    """Reads a task's batches ahead. keywords: see `StepLoader`."""

    def __init__(
        self, batches: BatchesOfTask, plan: Callable[[int], Sequence[int]], **keywords: Any
    ) -> None:
        self._batches = batches
        super().__init__(plan, **keywords)

    def _load(self, step: int, index: int) -> TaskMicrobatch:
        read = self._batches.microbatch(step, index, self._part, self._parts)
        if not device_kind(self._device.type).pins_batches:
            return read
        return read.map(Tensor.pin_memory)

    def _to_device(self, host: TaskMicrobatch) -> TaskMicrobatch:
        digest = self._batches.digest(host)
        entries = [{**entry, "hash": digest} for entry in host.entries]
        return replace(host.map(self._move), entries=entries)


def refuse_random_samples(batches: BatchesOfTask, start: int, stop: int) -> None:
    """Read these samples twice. Raises TaskError if they differ."""
    if len({tensor_hash(batches.read_samples(start, stop)) for _ in range(2)}) > 1:
        raise TaskError(
            "the same samples are different tensors when they are read again",
            remedy="draw random numbers where the loss is computed: their seed is set there",
        )


_PADS = {"inputs": 0, "targets": IGNORED_TARGET, "documents": 0, "weights": 0, FEATURES: 0}


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

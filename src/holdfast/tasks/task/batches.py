"""Every batch of a task's run, by step number: the user's samples in the run's order.

The order, the positions and the ledger are those of token data (`data/stream/batch.py`): a sample
is an index of the user's dataset. A skipped microbatch is not read. It has no tensors, and its loss
and its gradient are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from xxhash import xxh3_64

from holdfast.config.run import RunConfig
from holdfast.core.data.sample_order import BatchSchedule, SampleOrder
from holdfast.core.data.skips import Skips
from holdfast.core.devices import device_kind
from holdfast.core.seeds import key_seed
from holdfast.core.weights import read_weight
from holdfast.data.stream.loader import StepLoader
from holdfast.errors import START_OVER, TaskError
from holdfast.tasks.task.loading import user_code
from holdfast.tasks.task.task import Samples, Task

SOURCE = "task"
"""The name of the data in the ledger."""


@dataclass(frozen=True)
class TaskMicrobatch:
    """A logical microbatch, or a rank's part of it. tensors: empty for one that is skipped.

    key: seed of the random numbers of its forward pass. tokens: its weight.
    """

    tensors: Mapping[str, Tensor]
    key: int
    entries: list[dict[str, Any]]
    tokens: float

    @property
    def arguments(self) -> tuple[Mapping[str, Tensor], int]:
        """What the objective takes."""
        return self.tensors, self.key


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
        return collated(self._task, self._samples, indices.tolist(), times)

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
    task: Task, samples: Samples, indices: Sequence[int], times: int = 1
) -> Mapping[str, Tensor]:
    """The batch of these samples, `times` after each other. Raises TaskError."""
    items: list[Mapping[str, Any]] = []
    for index in indices:
        with user_code(f"sample {index} cannot be read"):
            items.append(samples[index])
    with user_code(f"collate() failed for samples {_shortened(indices)}"):
        batch: Any = task.collate(items * times)
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


class BatchesOfTask(Protocol):
    """A task's own data, or the prepared tokens."""

    skips: Skips
    microbatch_size: int
    schedule: BatchSchedule

    def positions(
        self, step: int, index: int, part: int = 0, parts: int = 1
    ) -> tuple[int, int]: ...

    def microbatch(
        self, step: int, index: int, part: int = 0, parts: int = 1
    ) -> TaskMicrobatch: ...

    def read_samples(self, start: int, stop: int, times: int = 1) -> Mapping[str, Tensor]: ...

    def digest(self, batch: TaskMicrobatch) -> str: ...


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
        return replace(read, tensors=_each(read.tensors, Tensor.pin_memory))

    def _to_device(self, host: TaskMicrobatch) -> TaskMicrobatch:
        digest = self._batches.digest(host)
        entries = [{**entry, "hash": digest} for entry in host.entries]
        return replace(host, tensors=_each(host.tensors, self._move), entries=entries)


def _each(
    tensors: Mapping[str, Tensor], change: Callable[[Tensor], Tensor]
) -> Mapping[str, Tensor]:
    return {name: change(tensor) for name, tensor in tensors.items()}


def refuse_random_samples(batches: BatchesOfTask, start: int, stop: int) -> None:
    """Read these samples twice. Raises TaskError if they differ."""
    if len({tensor_hash(batches.read_samples(start, stop)) for _ in range(2)}) > 1:
        raise TaskError(
            "the same samples are different tensors when they are read again",
            remedy="draw random numbers where the loss is computed: their seed is set there",
        )

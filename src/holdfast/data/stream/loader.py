"""Batches as tensors, read ahead of the training loop by one thread."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, Self, TypeVar

import torch

from holdfast.core.devices import device_kind
from holdfast.core.seeds import key_seed
from holdfast.data.stream.batch import Microbatch, fed_hash

WAIT_SIGN_S = 0.5
"""Seconds between two calls of `on_wait`."""


class BatchSource(Protocol):
    """The source of a Loader; `batch.Batches` is one."""

    def microbatch(self, step: int, index: int, part: int = 0, parts: int = 1) -> Microbatch: ...


@dataclass(frozen=True)
class TensorMicrobatch:
    """A Microbatch on a device. inputs, targets: int64 [B, S]; documents: int32 [B, S] or None.
    key: seed of the random numbers of its forward pass, if there are any. side: [B, S] each."""

    inputs: torch.Tensor
    targets: torch.Tensor
    documents: torch.Tensor | None
    entries: list[dict[str, Any]]
    tokens: float
    key: int | None = None
    side: Mapping[str, torch.Tensor] = field(default_factory=dict)


class LoadedMicrobatch(Protocol):
    """What every kind of microbatch has. entries: of the ledger. tokens: its weight."""

    @property
    def entries(self) -> list[dict[str, Any]]: ...

    @property
    def tokens(self) -> float: ...


M = TypeVar("M", bound=LoadedMicrobatch)


@dataclass(frozen=True)
class StepBatch(Generic[M]):
    """This worker's share of one step, in the plan's order."""

    step: int
    microbatches: list[M]

    @property
    def entries(self) -> list[dict[str, Any]]:
        """The ledger of the step: what `events.BatchFed` takes."""
        return [entry for microbatch in self.microbatches for entry in microbatch.entries]

    @property
    def tokens(self) -> float:
        return sum(microbatch.tokens for microbatch in self.microbatches)


class StepLoader(ABC, Generic[M]):
    """Iterates over steps from `first_step` on, at most `depth` steps read ahead.

    `plan(step)` gives the indices of the microbatches that this worker computes, `part` of `parts`
    its share of their samples. The hash in each ledger entry is computed in `_to_device`, from the
    memory of the tensors that are handed over. So it covers what was really fed. An error while
    reading is raised by the step that it belongs to. When membership changes, close it and make
    another.
    """

    def __init__(
        self,
        plan: Callable[[int], Sequence[int]],
        *,
        part: int = 0,
        parts: int = 1,
        first_step: int = 1,
        last_step: int | None = None,
        device: torch.device | str = "cpu",
        depth: int = 2,
    ):
        self._plan = plan
        self._part, self._parts = part, parts
        self._device = torch.device(device)
        self._depth = max(1, depth)
        self._last = last_step
        self._ready: deque[StepBatch[M]] = deque()
        self._error: BaseException | None = None
        self._is_at_end = False
        self._is_closed = False
        self.on_wait: Callable[[], None] = lambda: None
        """Called now and then while the training loop waits for a step."""
        self.on_step: Callable[[int], None] = lambda step: None
        """Called with each step that is handed over."""
        self.on_close: Callable[[], None] = lambda: None
        """Ends what the reading thread waits for."""
        self._changed = threading.Condition()
        self.waited_s = 0.0  # by the training loop, since the start
        self._thread = threading.Thread(
            target=self._read, args=(first_step,), name="holdfast-loader", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[StepBatch[M]]:
        return self

    def __next__(self) -> StepBatch[M]:
        """The next step's share. Raises StopIteration after the last step or `close`, and
        whatever reading it raised."""
        begun = time.perf_counter()
        with self._changed:
            while not self._changed.wait_for(self._is_answerable, WAIT_SIGN_S):
                self.on_wait()
            self.waited_s += time.perf_counter() - begun
            if self._is_closed:
                raise StopIteration
            if not self._ready:
                if self._error is not None:
                    raise self._error
                raise StopIteration
            batch = self._ready.popleft()
            self._changed.notify_all()
        self.on_step(batch.step)
        return StepBatch(batch.step, [self._to_device(m) for m in batch.microbatches])

    def _is_answerable(self) -> bool:
        """Return True if `__next__` has something to return or to raise."""
        return bool(self._ready or self._is_at_end or self._is_closed)

    def close(self) -> None:
        """Stop reading and wait for the thread to end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self.on_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _read(self, step: int) -> None:
        try:
            while self._last is None or step <= self._last:
                batch = StepBatch(step, [self._load(step, index) for index in self._plan(step)])
                with self._changed:
                    self._ready.append(batch)
                    self._changed.notify_all()
                    self._changed.wait_for(
                        lambda: len(self._ready) < self._depth or self._is_closed
                    )
                    if self._is_closed:
                        return
                step += 1
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._is_at_end = True
                self._changed.notify_all()

    @abstractmethod
    def _load(self, step: int, index: int) -> M:
        """Read a microbatch, on the reading thread."""

    @abstractmethod
    def _to_device(self, host: M) -> M:
        """Move it to the device, with the hash of what is handed over in its entries."""

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        # Pinned memory is not used again before the copy ends: torch's host allocator sees to it.
        return tensor.to(self._device, non_blocking=True)


class Loader(StepLoader[TensorMicrobatch]):
    """Reads a token dataset ahead. seed: of the microbatches' keys; None: they have none. weigh:
    counts what a microbatch weighs; None: it says so. keywords: see `StepLoader`."""

    def __init__(
        self,
        batches: BatchSource,
        plan: Callable[[int], Sequence[int]],
        *,
        seed: int | None = None,
        weigh: Callable[[Microbatch], float] | None = None,
        **keywords: Any,
    ) -> None:
        self._batches, self._seed, self._weigh = batches, seed, weigh
        super().__init__(plan, **keywords)

    def _load(self, step: int, index: int) -> TensorMicrobatch:
        """Host tensors, in pinned memory when they will be copied to a device."""
        read = self._batches.microbatch(step, index, self._part, self._parts)
        inputs, targets = torch.from_numpy(read.inputs), torch.from_numpy(read.targets)
        documents = None if read.documents is None else torch.from_numpy(read.documents)
        side = {name: torch.from_numpy(rows) for name, rows in read.side.items()}
        if device_kind(self._device.type).pins_batches:
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
            documents = None if documents is None else documents.pin_memory()
            side = {name: rows.pin_memory() for name, rows in side.items()}
        key, tokens = None, read.tokens if self._weigh is None else self._weigh(read)
        if self._seed is not None:
            key = key_seed(self._seed, "forward", step, index, self._part, self._parts)
        return TensorMicrobatch(inputs, targets, documents, read.entries, tokens, key, side)

    def _to_device(self, host: TensorMicrobatch) -> TensorMicrobatch:
        side = {name: rows.numpy() for name, rows in host.side.items()}
        digest = fed_hash(host.inputs.numpy(), host.targets.numpy(), side)
        entries = [{**entry, "hash": digest} for entry in host.entries]
        if self._device.type == "cpu":
            return replace(host, entries=entries)
        return replace(
            host,
            inputs=self._move(host.inputs),
            targets=self._move(host.targets),
            documents=None if host.documents is None else self._move(host.documents),
            entries=entries,
            side={name: self._move(rows) for name, rows in host.side.items()},
        )

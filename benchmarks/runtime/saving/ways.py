"""PyTorch's own ways of saving: plain `torch.save`, and torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.runtime.saving.task import Task, Way

State = Mapping[str, Tensor]


class Plain:
    """`torch.save` on rank 0 and a sync to disk; the other ranks wait for it."""

    def __init__(self, task: Task, state: State) -> None:
        self._path, self._state = f"{task.folder}/plain.pt", dict(state)

    def begin(self, step: int) -> None:
        if dist.get_rank() == 0:
            with open(self._path, "wb") as file:
                torch.save(self._state, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()

    def fence(self) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None:
        if dist.get_rank() == 0:
            os.remove(self._path)


class Dcp:
    """`dcp.save`; with `start`, an asynchronous save that it begins."""

    def __init__(
        self, task: Task, state: State, start: Callable[[dict[str, Any], str], Any] | None = None
    ) -> None:
        self._folder, self._state, self._start = f"{task.folder}/dcp", dict(state), start
        self._saving: Future[Any] | None = None
        self._newest = ""

    def begin(self, step: int) -> None:
        self.finish()  # one at a time: it says so itself
        before, self._newest = self._newest, f"{self._folder}-{step}"
        if before and dist.get_rank() == 0:
            shutil.rmtree(before)
        if self._start is None:
            dcp.save(dict(self._state), checkpoint_id=self._newest)
        else:
            self._saving = self._start(dict(self._state), self._newest)

    def fence(self) -> None: ...

    def finish(self) -> None:
        if self._saving is not None:
            self._saving.result()
            self._saving = None

    def close(self) -> None:
        self.finish()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self._newest)


def _default(state: dict[str, Any], where: str) -> Any:
    return dcp.async_save(state, checkpoint_id=where)


def _with_stager(kind: AsyncCheckpointerType, shared: bool) -> Callable[[dict[str, Any], str], Any]:
    options = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=shared,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )
    stager = DefaultStager(options)

    def start(state: dict[str, Any], where: str) -> Any:
        return dcp.async_save(
            state, checkpoint_id=where, async_checkpointer_type=kind, async_stager=stager
        )

    return start


def make(name: str, task: Task, state: State) -> Way:
    """A way by its name."""
    if name == "torch.save":
        return Plain(task, state)
    if name == "DCP save":
        return Dcp(task, state)
    if name == "DCP async":
        return Dcp(task, state, _default)
    if name == "DCP async, stager kept":
        return Dcp(task, state, _with_stager(AsyncCheckpointerType.THREAD, shared=False))
    if name == "DCP async, process":
        return Dcp(task, state, _with_stager(AsyncCheckpointerType.PROCESS, shared=True))
    raise ValueError(name)

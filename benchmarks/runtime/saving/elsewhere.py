"""Saves with torch_checkpointing (meta-pytorch) as its documentation recommends. That is a manager,
its lock around the update, and a future for the end of the write. It never syncs to disk."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from benchmarks.runtime.saving.task import Task


class Managed:
    def __init__(self, task: Task, state: Mapping[str, Tensor]) -> None:
        from torch_checkpointing.checkpoint_manager import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self._folder, self._state = f"{task.folder}/managed", dict(state)
        # 0.1.1 opens with O_DIRECT and then writes unaligned pieces, which ext4 refuses.
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager: Any = CheckpointManager(CheckpointManager.Config(storage_config=storage))
        self._saving: Any = None
        self._newest = ""

    def begin(self, step: int) -> None:
        self.finish()
        before, self._newest = self._newest, f"{self._folder}-{step}"
        if before and dist.get_rank() == 0:
            shutil.rmtree(before, ignore_errors=True)
        self._saving = self._manager.save(self._newest, {"state": self._state})

    def fence(self) -> None:
        with self._manager.lock():
            pass

    def finish(self) -> None:
        if self._saving is not None:
            self._saving.result()
            self._saving = None

    def close(self) -> None:
        self.finish()
        self._manager.close()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self._newest, ignore_errors=True)

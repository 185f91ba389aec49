"""What a worker's spec sets up in its process: configuration, data, threads and log."""

from __future__ import annotations

import torch

from holdfast.config.run import RunConfig
from holdfast.core.data.skips import Skips
from holdfast.core.devices import device_kind
from holdfast.elastic.protocol.worker_spec import WorkerSpec
from holdfast.elastic.worker.transport_watch import TransportWatch
from holdfast.parallel.comm.devices import describe_device, select_device
from holdfast.tasks.choose import open_task
from holdfast.training.engine.task import EngineTask, TaskBatchSource
from holdfast.wire import lifeline, process_log
from holdfast.wire.process_title import set_process_title


class WorkerSetup:
    """The newest spec of a worker, and what its process derives from it."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.config = RunConfig.model_validate(spec.config)
        self._task: EngineTask | None = None
        self._batches: TaskBatchSource | None = None
        self._use_device()
        self.transport = TransportWatch(device_kind(self.device.type))

    @property
    def device(self) -> torch.device:
        return torch.device(self.spec.device)

    @property
    def known_device(self) -> torch.device | None:
        """Return the device that this process computes on; None: it has not been given one."""
        name = self.spec.device
        is_known = ":" in name or not device_kind(name).has_index
        return self.device if is_known else None

    def describe_device(self) -> str:
        """Return the device with its backends and what carries their data, for the journal."""
        return ", ".join(filter(None, (describe_device(self.device), self.transport.names)))

    def apply(self, spec: WorkerSpec) -> None:
        """Apply a newer spec to this process."""
        if spec.config != self.spec.config or spec.dataset != self.spec.dataset:
            self.config = RunConfig.model_validate(spec.config)
            self._task, self._batches = None, None
        if spec.threads != self.spec.threads:
            torch.set_num_threads(spec.threads)
        process_log.enter(spec.generation, spec.rank)
        set_process_title(f"worker {spec.rank}", self.config.name)
        self.spec = spec
        self._use_device()

    def _use_device(self) -> None:
        """Let this process compute on the spec's device. A standby may have none yet."""
        if (device := self.known_device) is not None:
            select_device(device)

    @property
    def task(self) -> EngineTask:
        """What is trained, made once. Raises TaskError for a task that is not the run's."""
        if self._task is None:
            if self.config.task.name:
                lifeline.let_children_be_ended()
            self._task = open_task(self.config, self.device)
        return self._task

    def open_batches(self) -> TaskBatchSource:
        """Return the data, opened once, with the skips of the newest spec."""
        if self._batches is None:
            self._batches = self.task.open_batches(self.spec.dataset)
        self._batches.skips = self.spec.skips or Skips()
        return self._batches

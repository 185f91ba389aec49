"""What a worker's spec sets up in its process: configuration, data, threads and log."""

from __future__ import annotations

import logging
import os
import threading

import torch

from holdfast.config.run import RunConfig
from holdfast.config.sections.layout import LayoutConfig
from holdfast.core.data.skips import Skips
from holdfast.core.devices import DeviceKind, device_kind, run_device_kind
from holdfast.core.transports import (
    Channel,
    NodeLinks,
    SlowTransport,
    find_channels,
    find_slow_transport,
    name_transports,
)
from holdfast.data.stream.batch import Batches
from holdfast.elastic.protocol.worker_spec import WorkerSpec
from holdfast.errors import LayoutError
from holdfast.layout import Topology
from holdfast.machine.links import TOPOLOGY_TIMEOUT_S, detect_links
from holdfast.parallel.comm.backend_log import BackendLog
from holdfast.parallel.comm.devices import describe_device, select_device
from holdfast.tasks.choose import open_task
from holdfast.tasks.task.batches import TokenBatches
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
        self.kind = run_device_kind(self.config, spec.device)
        self.transport = TransportWatch(self.kind)

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
        return ", ".join(
            filter(None, (describe_device(self.device, self.kind), self.transport.names))
        )

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
        match self._batches:
            case (Batches() as tokens) | TokenBatches(tokens=tokens):
                tokens.fetch_ahead(self.spec.start_step + 1)  # while the model is built
        return self._batches


logger = logging.getLogger(__name__)


class TransportWatch:
    """Reads a backend's log and the node's links. Create it after the fork.

    If a person has set the variables of the log, the worker's own log gets what the backend says.
    """

    def __init__(self, kind: DeviceKind) -> None:
        self._log: BackendLog | None = None
        self._links = NodeLinks()
        self._channels: frozenset[Channel] = frozenset()
        if kind.log_variable:
            self._is_wanted = any(name in os.environ for name in kind.log_settings)
            self._log = BackendLog(kind.log_settings, kind.log_variable)
            self._reader = threading.Thread(target=self._read_links, name="links", daemon=True)
            self._reader.start()  # the vendor's tool takes a second

    def _read_links(self) -> None:
        self._links = detect_links()

    @property
    def names(self) -> str:
        """What carries the data: "NVLink and InfiniBand"; "" if the backend has told nothing."""
        return name_transports(self._channels, self._links)

    def find_slow(self, topology: Topology) -> SlowTransport | None:
        """Return the way of a generation's data that is slow without need, if there is one. Call it
        once all groups are made."""
        if self._log is None or not (text := self._log.read_new()):
            return None
        self._channels = find_channels(text) or self._channels
        self._reader.join(TOPOLOGY_TIMEOUT_S)
        others = len(set(topology.nodes)) > 1
        slow = find_slow_transport(text, self._links, os.environ, has_other_nodes=others)
        if self._is_wanted or slow is not None:
            _log(text)
        return slow

    def log_unread(self) -> None:
        """Write what the backend has said since the last call into the worker's log."""
        if self._log is not None and (text := self._log.read_new()):
            _log(text)

    def refuse_slow(self, topology: Topology, layout: LayoutConfig) -> None:
        """Raise LayoutError if data takes a slow way without need, unless the run file accepts
        it."""
        slow = self.find_slow(topology)
        if slow is not None and not layout.allow_tcp:
            raise LayoutError(
                slow.sentence,
                where="layout.allow_tcp",
                remedy=f"{slow.advice}, or use layout.allow_tcp=true",
            )


def _log(text: str) -> None:
    logger.info("the device's backend says:\n%s", text.rstrip())

"""Which device of its node a process computes on.

A process keeps its device for as long as it lives, whatever rank it gets. A standby has none until
it gets a rank. Then it takes a free device, which may be that of the worker that it replaces. If
there is a standby for each device, each gets its device at once, and prepares it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from holdfast.core.devices import DeviceKind
from holdfast.elastic.node.worker_process import STANDBY_RANK, WorkerProcess
from holdfast.elastic.protocol.worker_spec import WorkerSpec


class DevicePlaces:
    """Gives the devices of one node to its processes. count: of those that the run uses here."""

    def __init__(self, kind: DeviceKind, count: int) -> None:
        self.kind, self._count = kind, max(1, count)

    def place(
        self, spec: WorkerSpec, process: WorkerProcess | None, processes: Iterable[WorkerProcess]
    ) -> WorkerSpec:
        """Return the spec with the device of `process`, or with a free one if it has none."""
        if process is not None and process.device:
            return replace(spec, device=process.device)
        alive = [each for each in processes if each.is_alive and each is not process]
        ranked = Counter(each.device for each in alive if each.rank != STANDBY_RANK)
        held = Counter(each.device for each in alive)
        devices = [self.kind.device(index) for index in range(self._count)]
        return replace(spec, device=min(devices, key=lambda name: (ranked[name], held[name])))

    def place_standby(
        self, spec: WorkerSpec, count: int, processes: Iterable[WorkerProcess]
    ) -> WorkerSpec:
        """Return the spec of one of `count` standbys, with its device if each device has one."""
        if count < self._count:
            return spec
        held = Counter(each.device for each in processes if each.is_standby)
        devices = [self.kind.device(index) for index in range(self._count)]
        return replace(spec, device=min(devices, key=lambda name: held[name]))

    def choose_standby(
        self, idle: Sequence[WorkerProcess], processes: Collection[WorkerProcess]
    ) -> WorkerProcess | None:
        """Return the standby that gets a rank: a prepared one if possible. Return None if there is
        none, or if the devices of all are in use."""
        taken = Counter(
            each.device for each in processes if each.is_alive and each.rank != STANDBY_RANK
        )
        limit = self.kind.ranks_per_device
        able = [
            each for each in idle if not (limit and each.device and taken[each.device] >= limit)
        ]
        prepared = [each for each in able if each.acked_command >= 0]
        return next(iter(prepared or able), None)

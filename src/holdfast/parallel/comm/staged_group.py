"""gloo for a device's tensors: each is copied into locked host memory, travels, and is copied back.

`StagedGroup` has the operations of a gloo group. `StagedProcessGroup` is one that torch's registry
takes for a backend, so that DeviceMesh, FSDP2 and torch's collectives use it as any other. Under
the name "gloo" they would not: DeviceMesh makes a group of NCCL for a mesh of CUDA devices.

Operations begin with what the calling thread has computed. The thread that waits for an operation
copies what has arrived. A wait that fails copies nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.core.devices import STAGED_GLOO, device_kind
from holdfast.parallel.comm.host_buffers import Buffer, HostCopies
from holdfast.parallel.torch_compat import (
    GlooGroup,
    Work,
    gloo_device,
    gloo_group,
    nameless_backend,
)


class StagedWork:
    """An operation that reads and writes buffers. It keeps them until nothing refers to it.

    sent: what it reads. arrived, into: what it writes, and where that belongs.
    """

    def __init__(
        self,
        work: Work,
        copies: HostCopies,
        sent: Buffer | None = None,
        arrived: Buffer | None = None,
        into: Tensor | None = None,
    ) -> None:
        self._work, self._copies, self._sent = work, copies, sent
        self._arrived, self._into = arrived, into

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the content is where it belongs. Raises as the operation does."""
        self._work.wait() if timeout is None else self._work.wait(timeout)
        arrived, into, self._arrived, self._into = self._arrived, self._into, None, None
        if arrived is not None and into is not None:
            self._copies.put_back(arrived, into)
        return True


class StagedGroup:
    """A gloo group whose operations take tensors of a device. staged_type: of that device. Tensors
    elsewhere travel as they are."""

    def __init__(self, inner: GlooGroup, staged_type: str) -> None:
        self._inner, self._type = inner, staged_type
        self.copies = HostCopies(staged_type)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """Start to send. The tensor may change at once, and the work must be kept."""
        return self._start(tensors[0], None, lambda sent, _: self._inner.send([sent], peer, tag))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        return self._start(None, tensors[0], lambda _, into: self._inner.recv([into], peer, tag))

    def allreduce(self, tensors: list[Tensor], *_: object) -> Work:
        (tensor,) = tensors if isinstance(tensors, list) else (tensors,)
        if tensor.device.type != self._type:
            return self._inner.allreduce([tensor])
        buffer = self.copies.take_out(tensor)
        started = self._inner.allreduce([buffer.tensor])
        work: Any = StagedWork(started, self.copies, None, buffer, tensor)
        return work  # type: ignore[no-any-return]

    def alltoall_base(
        self,
        out: Tensor,
        tensor: Tensor,
        out_sizes: Sequence[int],
        sizes: Sequence[int],
        *_: object,
    ) -> Work:
        return self._start(
            tensor,
            out,
            lambda sent, into: self._inner.alltoall_base(into, sent, list(out_sizes), list(sizes)),
        )

    def _allgather_base(self, out: Tensor, part: Tensor, *_: object) -> Work:
        return self._start(part, out, lambda sent, into: self._inner._allgather_base(into, sent))

    def _start(
        self, read: Tensor | None, written: Tensor | None, start: Callable[[Any, Any], Work]
    ) -> Work:
        """Start an operation that reads one tensor and writes the other."""
        used = written if read is None else read
        if used is None or used.device.type != self._type:
            return start(read, written)
        sent = None if read is None else self.copies.take_out(read)
        arrived = None if written is None else self.copies.arena.take(written)
        work: Any = StagedWork(
            start(sent and sent.tensor, arrived and arrived.tensor),
            self.copies,
            sent,
            arrived,
            written,
        )
        return work  # type: ignore[no-any-return]


class StagedProcessGroup(dist.ProcessGroup):
    """A `StagedGroup` as torch's registry knows a group: torch's functions call these methods."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._place, self._count = rank, size
        kind = torch.accelerator.current_accelerator()
        device = gloo_device(os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
        seconds = timeout.total_seconds()
        inner = gloo_group(store, "staged", rank, size, device=device, seconds=seconds)
        self._staged: StagedGroup | None = StagedGroup(inner, "cpu" if kind is None else kind.type)
        nameless_backend(self, rank, size)

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return STAGED_GLOO

    def name(self) -> str:
        return STAGED_GLOO

    def rank(self) -> int:
        return self._place

    def size(self) -> int:
        return self._count

    def shutdown(self) -> None:
        """Drop the connections; torch's registry drops the rest."""
        self._staged = None

    @property
    def staged(self) -> StagedGroup:
        if self._staged is None:
            raise RuntimeError("gloo: this group was closed. Connection closed by this rank")
        return self._staged

    def allreduce(self, *arguments: Any) -> Any:
        return self.staged.allreduce(*arguments)

    def alltoall_base(self, *arguments: Any) -> Any:
        return self.staged.alltoall_base(*arguments)

    def all_to_all_single(self, *arguments: Any) -> Any:
        return self.staged.alltoall_base(*arguments)

    def _allgather_base(self, *arguments: Any) -> Any:
        return self.staged._allgather_base(*arguments)

    def all_gather_single(self, *arguments: Any) -> Any:
        return self.staged._allgather_base(*arguments)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return self.staged.send(tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return self.staged.recv(tensors, peer, tag)


def register_staged_gloo() -> None:
    """Make the backend known to torch, once in a process."""
    registry: Any = dist.Backend
    if not hasattr(registry, STAGED_GLOO.upper()):
        types = ["cpu", *filter(None, [_accelerator_type()])]
        registry.register_backend(STAGED_GLOO, StagedProcessGroup, devices=types)


def _accelerator_type() -> str:
    found = torch.accelerator.current_accelerator()
    return "" if found is None else device_kind(found.type).name

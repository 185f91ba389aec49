"""The memory of one rank's state, in the places that `train.memory` names.

    device   memory of the device
    host     memory of the machine, locked if an accelerator copies from it
    file     a mapped file (`scratch_file.py`)

Each tensor of the state is a plain tensor that the CPU or the device can address, wherever it
lies. So captures, digests, moves and restores need to know nothing of places. An update does:
it reads and writes a file by calls, which fail with an error, and not by the map.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from holdfast.config.sections.memory import DEVICE, FILE, HOST, MemoryConfig, Place
from holdfast.core.sharding.update_pieces import ALIGNMENT
from holdfast.parallel.torch_compat import unobserved
from holdfast.training.memory.ledger import MemoryLedger
from holdfast.training.memory.scratch_file import ScratchFile
from holdfast.training.memory.transfers import TransferAccount

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Region:
    """Addresses [start, stop) of the host. file: what is mapped there; None: plain memory."""

    kind: str
    start: int
    stop: int
    file: ScratchFile | None


class StateMemory:
    """Gives memory of zeros for state, and moves parts of it to and from buffers of the device.

    label: names the rank, for the moment in which its file has a name. movable: keys of `config`
    that a person may still change to use less of the device. ledger: counts the bytes.
    transfers: counts copies between the places, and waits for them.
    """

    def __init__(
        self,
        config: MemoryConfig,
        device: torch.device,
        label: str = "",
        movable: Sequence[str] = (),
    ) -> None:
        self.config, self.device = config, device
        self.ledger, self.transfers = MemoryLedger(config.limit, movable), TransferAccount()
        self._label, self._lock = label, threading.Lock()
        self._regions: list[_Region] = []  # outside of the device, by rising addresses

    @property
    def stages_updates(self) -> bool:
        """Return True if an update has to bring something to the device."""
        return self.config.moves_state

    @property
    def updates_on_host(self) -> bool:
        """Return True if the update runs on the host, wherever the state lies."""
        return self.config.update == HOST

    def is_staged(self, tensor: Tensor) -> bool:
        """Return True for a tensor of the state that an update uses through a buffer."""
        region = self._region_of(tensor)
        if not self.updates_on_host:
            return region is not None
        return tensor.device.type != "cpu" or (region is not None and region.file is not None)

    def place_of(self, kind: str) -> Place:
        """Return the place of `optimizer`, `gradients` or `parameters` (shards of them)."""
        place: Place = getattr(self.config, kind)
        return place

    def zeros(self, kind: str, shapes: Sequence[Shape], dtype: torch.dtype) -> list[Tensor]:
        """Return tensors of zeros in the place of their kind, outside of the device in one run.

        Raises StateMemoryError if they do not fit there.
        """
        # With a limit passes are counted too. Then these must not be counted twice.
        with unobserved() if self.ledger.limit else nullcontext():
            place = self.place_of(kind)
            if place == DEVICE:
                self.ledger.add(DEVICE, kind, dtype.itemsize * sum(map(prod, shapes)))
                return [torch.zeros(shape, dtype=dtype, device=self.device) for shape in shapes]
            sizes = [-(-prod(shape) // ALIGNMENT) * ALIGNMENT for shape in shapes]
            elements = max(ALIGNMENT, sum(sizes))
            # -> [elements], of zeros
            file: ScratchFile | None = None
            if place == HOST:
                flat = torch.zeros(elements, dtype=dtype, pin_memory=self.device.type != "cpu")
            else:
                assert place == FILE, place
                file = self.file(elements * dtype.itemsize)
                flat = torch.frombuffer(file.map, dtype=dtype, count=elements)
            start = flat.data_ptr()
            added = _Region(kind, start, start + flat.nbytes, file)
            with self._lock:  # buffers of messages are made by threads
                self._regions = sorted([*self._regions, added], key=lambda region: region.start)
            self.ledger.add(place, kind, flat.nbytes)
            parts = zip(torch.split(flat[: sum(sizes)], sizes), shapes, strict=True)
            return [part[: prod(shape)].view(shape) for part, shape in parts]

    def is_locked(self, tensor: Tensor) -> bool:
        """Return True for a tensor of `zeros` that an accelerator copies by itself."""
        region = self._region_of(tensor)
        return region is not None and region.file is None and self.device.type != "cpu"

    def count(self, kind: str, tensors: Iterable[Tensor | None]) -> None:
        """Count tensors of the device. Raises StateMemoryError beyond the device's limit."""
        nbytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        self.ledger.add(DEVICE, kind, nbytes)

    def forget(self, kind: str) -> None:
        """Count what `zeros` has given for a kind as released: nothing uses it any more."""
        place = self.place_of(kind)
        self.ledger.add(place, kind, -self.ledger.by_kind(place).get(kind, 0))
        for file in (region.file for region in self._regions if region.kind == kind):
            if file is not None:
                file.close()
        with self._lock:
            self._regions = [region for region in self._regions if region.kind != kind]

    def host_buffer(self, nbytes: int) -> Tensor:
        """Return bytes of the host, locked if an accelerator copies from them. No account of the
        device's tensors sees them. The caller counts them."""
        with unobserved():
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.device.type != "cpu")

    def file(self, nbytes: int) -> ScratchFile:
        """Return a file in `folder`. The caller counts its bytes. Raises StateMemoryError."""
        return ScratchFile(self.config.folder, self._label, nbytes)

    def load(self, part: Tensor, into: Tensor) -> None:
        """Fill a buffer of the host with a contiguous part of a tensor of the state. Raises
        StateMemoryError if a disk fails."""
        region = self._region_of(part)
        if region is None or region.file is None:
            into.copy_(part)
        else:
            region.file.read(as_bytes(into), part.data_ptr() - region.start)

    def store(self, part: Tensor, source: Tensor) -> None:
        """Write a buffer of the host to a contiguous part of a tensor of the state. Raises
        StateMemoryError if a disk fails."""
        region = self._region_of(part)
        if region is None or region.file is None:
            part.copy_(source)
        else:
            region.file.write(as_bytes(source), part.data_ptr() - region.start)

    def _region_of(self, tensor: Tensor) -> _Region | None:
        if tensor.device.type != "cpu":
            return None
        address, regions = tensor.data_ptr(), self._regions
        found = bisect_right(regions, address, key=lambda region: region.start) - 1
        return regions[found] if found >= 0 and address < regions[found].stop else None


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor of the host."""
    return tensor.view(-1).view(torch.uint8).numpy().data

"""Locked pages: memory that a device writes into directly, at the full speed of its link.

The driver refuses to lock 512 GiB in one call, so a mapping is locked in chunks. No copy may cross
from one chunk to the next, or to a page that is not locked: CUDA refuses such a copy. So
`PinnedMemory.edges` says where copies have to be cut.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Protocol

import torch

from holdfast.core.devices import device_kind

logger = logging.getLogger(__name__)

CHUNK_BYTES = 64 * 2**30
"""Most bytes that are locked in one call: a multiple of the page."""


class PinningApi(Protocol):
    """Calls of a driver that lock pages. Each returns the driver's error code; 0: it succeeded."""

    def register(self, address: int, nbytes: int) -> int: ...
    def unregister(self, address: int) -> int: ...

    def clear_error(self) -> None:
        """Forget a refusal, which the driver would report with the next work on the device."""


class CudaPinning:
    """The calls of CUDA's runtime, and of ROCm's under the same names.

    A thread may call that has used no device before. Without a choice, its first call would make a
    context on the first device, where another worker computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        module: Any = torch.cuda  # cudart has no annotations
        self._runtime = module.cudart()

    def register(self, address: int, nbytes: int) -> int:
        with torch.accelerator.device_index(self._device.index):
            return int(self._runtime.cudaHostRegister(address, nbytes, 0))

    def unregister(self, address: int) -> int:
        with torch.accelerator.device_index(self._device.index):
            return int(self._runtime.cudaHostUnregister(address))

    def clear_error(self) -> None:
        with suppress(RuntimeError):
            torch.zeros(1, device=self._device)


def find_pinning(devices: Iterable[torch.device]) -> PinningApi | None:
    """Return the calls that lock pages for copies from `devices`. None: no device needs them."""
    for device in devices:
        if device_kind(device.type).can_pin:
            return CudaPinning(device)
    return None


class PinnedMemory:
    """The locked chunks of one mapping. It must stay mapped until `close`.

    A refusal costs only the speed of that chunk's copies, which go through a bounce buffer then. So
    it is no error, and the worker's log says it.
    """

    def __init__(
        self, api: PinningApi | None, address: int, nbytes: int, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        """Lock the pages of a mapping. api: None: lock nothing."""
        self._api, self._address = api, address
        self._pinned: list[int] = []  # offsets of locked chunks
        starts = range(0, nbytes if api is not None else 0, chunk_bytes)
        self.edges: tuple[int, ...] = tuple(starts)[1:]
        """Offsets in the mapping that no copy may cross."""
        refused, code = 0, 0
        for start in starts:
            length = min(chunk_bytes, nbytes - start)
            failed = api.register(address + start, length) if api is not None else 0
            if failed:
                refused, code = refused + length, failed
            else:
                self._pinned.append(start)
        if refused and api is not None:
            api.clear_error()
            logger.warning(
                "the device does not lock %d of the arena's %d bytes (error %d of its driver): "
                "copies into these are slow",
                refused,
                nbytes,
                code,
            )

    def close(self) -> None:
        """Unlock every chunk: another arena may be mapped at the same address later."""
        pinned, self._pinned = self._pinned, []
        codes = [self._api.unregister(self._address + start) for start in pinned if self._api]
        if any(codes):
            logger.warning(
                "the device did not unlock %d chunks of an arena (error %d of its driver)",
                sum(map(bool, codes)),
                max(codes),
            )

"""Tensors of a device that travel by gloo, which reads and writes the host's memory only.

A copy to the host waits for the work that the calling thread has given to the device so far. So
what is sent is final. A copy from the host is made by the thread that waits for the message.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from holdfast.parallel.torch_compat import Work


class StagedWork:
    """An operation into `host`, whose content belongs into `tensor`."""

    def __init__(self, work: Work, host: Tensor, tensor: Tensor) -> None:
        self._work, self._host, self._tensor = work, host, tensor

    def wait(self, timeout: timedelta | None = None) -> object:
        """Return when the content is where it belongs. Raises as the operation does."""
        result = self._work.wait() if timeout is None else self._work.wait(timeout)
        with torch.no_grad():
            self._tensor.copy_(self._host)
        return result


def is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def to_host(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy of a device's."""
    return tensor if is_on_host(tensor) else tensor.to("cpu", copy=True)


def staged(tensor: Tensor, start: Callable[[Tensor], Work], *, reads: bool = False) -> Work:
    """Start an operation that writes `tensor`. reads: it also reads it."""
    if is_on_host(tensor):
        return start(tensor)
    host = to_host(tensor) if reads else torch.empty(tensor.shape, dtype=tensor.dtype)
    work: Any = StagedWork(start(host), host, tensor)
    return work  # type: ignore[no-any-return]

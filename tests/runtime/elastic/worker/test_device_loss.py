"""A worker whose device has failed exits: only a new process can use the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from holdfast.elastic.protocol import exit_codes
from holdfast.elastic.worker.generation_loop import run_generations
from holdfast.errors import DeviceStuckError


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        DeviceStuckError("cuda:0 still works on a group that was given up 10 s ago"),
    ],
)
def test_a_failed_device_ends_the_process(error: Exception) -> None:
    def train() -> None:
        raise error

    worker = SimpleNamespace(begin_generation=lambda: None, train=train, generation=1)
    commands = SimpleNamespace(start=lambda: None, is_halted=lambda generation: True)
    spec = SimpleNamespace(rank=0)
    code = run_generations(cast(Any, worker), cast(Any, spec), cast(Any, commands))
    assert code == exit_codes.PEER_LOST

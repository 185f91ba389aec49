"""Waiting for a device: what is timed must have ended there."""

from __future__ import annotations

import torch


def wait_for(device: torch.device) -> None:
    """Return when all work given to the device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)

"""Work that a process does only at its first step, done before it is needed.

The fork server has imported all that a step imports. The rest is the threads of the backward pass,
what torch makes at its first use, and compiled blocks. A standby does this while no rank waits for
it.

On a device, a standby also makes its context, if it knows which device it gets
(`elastic/node/process_manager.py`). It keeps no other memory there: the device is a worker's.
"""

from __future__ import annotations

import logging
import time

import torch

from holdfast.config.run import RunConfig
from holdfast.core.devices import device_kind
from holdfast.training.recover.warm_block import has_room, has_warm_block, run_block

logger = logging.getLogger(__name__)


def warm_up(config: RunConfig, device: torch.device | None) -> None:
    """Prepare this process for its first step. device: None: it is not known yet, or ranks wait.

    A failure costs only time in the first step, so it is logged and no more.
    """
    _multiply(torch.device("cpu"))
    if device is None:
        return
    begun, ready = time.monotonic(), []
    try:
        if not device_kind(device.type).is_host:
            _multiply(device)
            ready.append("a context")
        if has_warm_block(config, device):
            if has_room(device):
                run_block(config, device)
                ready.append("a compiled block" if config.train.compile else "a block")
            else:
                logger.info("no room on %s for a block next to the worker's memory", device)
    except Exception as error:
        logger.warning("the first step here will take longer: %s: %s", type(error).__name__, error)
    logger.info("warm: %s (%.1f s)", " and ".join(ready) or "imports", time.monotonic() - begun)


def _multiply(device: torch.device) -> None:
    """Multiply on a device, and back: its context, its library and its threads are there then."""
    x = torch.ones(2, 2, device=device, requires_grad=True)
    torch.autograd.backward((x @ x).sum())

"""A worker's main function, from its fork to its exit code.

    connect -> build -> restore (a committed checkpoint, or initial weights) -> train -> leave
                                                                   '-> adopt -'

A process outlives generations: `elastic/worker/generation_loop.py` is its loop if the agent sends
commands. The training loop knows three protocols (`train/protocols.py`), which are connected to
this process here. Events go to the agent through the reporter. The state goes into the mover's
arena. The agent's requests come back with its answers. Nothing here writes to a disk.
"""

from __future__ import annotations

import gc
import logging
from pathlib import Path

from holdfast.elastic.protocol import exit_codes
from holdfast.elastic.protocol.worker_spec import WorkerBoot
from holdfast.elastic.worker.commands import Orders
from holdfast.elastic.worker.generation_loop import live
from holdfast.elastic.worker.reporter import Reporter
from holdfast.elastic.worker.restore import RottenError
from holdfast.elastic.worker.worker import Worker
from holdfast.errors import FencedError, NonFiniteError, PeerLostError
from holdfast.train.malloc import keep_freed_memory
from holdfast.train.precision import same_products_on_any_threads
from holdfast.wire.secret import Secret

logger = logging.getLogger(__name__)

_LAST_WORDS = 2.0
"""Seconds that a worker tries to send its last report before it exits."""


_COLLECTS = (700, 10, 1000)
"""Python's own thresholds, except that a full collection is a hundred times as rare.

A step makes next to no cycles, and dropping a model collects explicitly. A useless full collection
takes a tenth of a second, and all ranks wait for this one.
"""


def run(boot: WorkerBoot, secret: Secret) -> int:
    """Run a worker; return the exit code that tells the agent how it ended."""
    same_products_on_any_threads()
    gc.set_threshold(*_COLLECTS)
    if boot.device == "cpu":
        keep_freed_memory()
    orders = Orders(boot.agent, secret) if boot.orders else None
    worker = Worker(boot, secret, orders)
    if folder := boot.config.get("cluster", {}).get("faults"):
        from holdfast.elastic.worker.fault_injection import arm

        arm(worker, Path(folder))
    return _once(worker) if orders is None else live(worker, boot, orders)


def _once(worker: Worker) -> int:
    """Take part in one generation."""
    try:
        try:
            worker.begin()
            outcome = worker.train()
        finally:
            worker.close()
    except PeerLostError as error:
        return _end(worker.reporter, exit_codes.PEER_LOST, error)
    except FencedError as error:
        return _end(worker.reporter, exit_codes.FENCED, error)
    except NonFiniteError as error:
        return _end(worker.reporter, exit_codes.NON_FINITE, error)
    except RottenError as error:
        return _end(worker.reporter, exit_codes.ROTTEN, error)
    return worker.leave(outcome)


def _end(reporter: Reporter, code: int, error: BaseException) -> int:
    """Exit with a reason: write it to the log, and send the pending reports to the agent."""
    logger.error("%s: %s", type(error).__name__, error)
    reporter.close(_LAST_WORDS)
    return code

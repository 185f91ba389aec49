"""What a worker does between its fork and its exit code.

    connect -> build -> restore (a committed checkpoint, or initial weights) -> train -> leave
                                                                   '-> adopt -'

A process outlives generations: `elastic/worker/generation_loop.py` is its loop where the agent
gives orders. The training loop knows three protocols (`train/protocols.py`); here they meet this
process: events go to the agent through the reporter, state goes into the mover's arena, and the
agent's wishes come back with its answers. Nothing here writes to a disk.
"""

from __future__ import annotations

import gc
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

_LAST_WORDS = 2.0
"""Seconds that a worker tries to be heard before it ends."""


_COLLECTS = (700, 10, 1000)
"""As Python's own, but that it looks through all objects a hundredth as often: a step makes next to
no cycles, whoever drops a model collects it, and a tenth of a second for nothing is one for all who
wait for this rank."""


def run(boot: WorkerBoot, secret: Secret) -> int:
    """A worker's entry; returns the exit code that tells the agent how it ended."""
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
    """Leave with a reason: into the log, and what was reported before it to the agent."""
    print(f"{type(error).__name__}: {error}", flush=True)
    reporter.close(_LAST_WORDS)
    return code

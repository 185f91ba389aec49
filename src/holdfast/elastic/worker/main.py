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
from holdfast.elastic.protocol.worker_spec import WorkerSpec
from holdfast.elastic.worker.commands import CommandClient
from holdfast.elastic.worker.generation_loop import run_generations
from holdfast.elastic.worker.reporter import AgentReporter
from holdfast.elastic.worker.restore import CorruptCheckpointError
from holdfast.elastic.worker.worker import Worker
from holdfast.errors import FencedError, NonFiniteError, PeerLostError
from holdfast.train.malloc import keep_freed_memory
from holdfast.train.precision import same_products_on_any_threads
from holdfast.wire.secret import Secret

logger = logging.getLogger(__name__)

_LAST_REPORT_TIMEOUT_S = 2.0
"""Seconds that a worker tries to send its last report before it exits."""


_GC_THRESHOLDS = (700, 10, 1000)
"""Python's own thresholds, except that a full collection is a hundred times as rare.

A step makes next to no cycles, and dropping a model collects explicitly. A useless full collection
takes a tenth of a second, and all ranks wait for this one.
"""


def run(spec: WorkerSpec, secret: Secret) -> int:
    """Run a worker; return the exit code that tells the agent how it ended."""
    same_products_on_any_threads()
    gc.set_threshold(*_GC_THRESHOLDS)
    if spec.device == "cpu":
        keep_freed_memory()
    orders = CommandClient(spec.agent, secret) if spec.orders else None
    worker = Worker(spec, secret, orders)
    if folder := spec.config.get("cluster", {}).get("faults"):
        from holdfast.elastic.worker.fault_injection import install_faults

        install_faults(worker, Path(folder))
    return _run_one_generation(worker) if orders is None else run_generations(worker, spec, orders)


def _run_one_generation(worker: Worker) -> int:
    """Take part in one generation; return the exit code that tells how it ended."""
    try:
        try:
            worker.begin_generation()
            outcome = worker.train()
        finally:
            worker.close()
    except PeerLostError as error:
        return _exit_with_error(worker.reporter, exit_codes.PEER_LOST, error)
    except FencedError as error:
        return _exit_with_error(worker.reporter, exit_codes.FENCED, error)
    except NonFiniteError as error:
        return _exit_with_error(worker.reporter, exit_codes.NON_FINITE, error)
    except CorruptCheckpointError as error:
        return _exit_with_error(worker.reporter, exit_codes.CORRUPT_CHECKPOINT, error)
    worker.report_outcome(outcome)
    worker.reporter.close()
    return exit_codes.FENCED if worker.reporter.is_fenced else exit_codes.DONE


def _exit_with_error(reporter: AgentReporter, code: int, error: BaseException) -> int:
    """Exit with a reason: write it to the log, and send the pending reports to the agent."""
    logger.error("%s: %s", type(error).__name__, error)
    reporter.close(_LAST_REPORT_TIMEOUT_S)
    return code

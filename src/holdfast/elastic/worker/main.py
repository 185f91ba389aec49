"""A worker's main function, from its fork to its exit code.

    connect -> build -> restore (a committed checkpoint, or initial weights) -> train -> leave
                                                                   '-> adopt -'

A process outlives generations: `elastic/worker/generation_loop.py` is its loop. The training loop
knows three protocols (`training/engine/protocols.py`), which are connected to this process here.
Events go to the agent through the reporter. The state goes into the mover's arena. The agent's
requests come back with its answers. Nothing here writes to a disk.
"""

from __future__ import annotations

import gc
from pathlib import Path

from holdfast.core.devices import device_kind
from holdfast.elastic.protocol.worker_spec import WorkerSpec
from holdfast.elastic.worker.commands import CommandClient
from holdfast.elastic.worker.generation_loop import run_generations
from holdfast.elastic.worker.worker import Worker
from holdfast.training.engine.precision import same_kernels_each_time, same_products_on_any_threads
from holdfast.training.memory.malloc import keep_freed_memory
from holdfast.wire.process_end import COLLECTION_THRESHOLDS
from holdfast.wire.secret import Secret


def run(spec: WorkerSpec, secret: Secret) -> int:
    """Run a worker; return the exit code that tells the agent how it ended."""
    same_products_on_any_threads()
    # A step makes next to no cycles, and dropping a model collects explicitly. A useless full
    # collection takes a tenth of a second, and all ranks wait for this one.
    gc.set_threshold(*COLLECTION_THRESHOLDS)
    if device_kind(spec.device).is_host:
        keep_freed_memory()
    elif (train := spec.config["train"])["deterministic"]:
        same_kernels_each_time(compiled=train["compile"])
    commands = CommandClient(spec.agent, secret)
    worker = Worker(spec, secret, commands)
    if folder := spec.config.get("cluster", {}).get("faults"):
        from holdfast.elastic.worker.fault_injection import install_faults

        install_faults(worker, Path(folder))
    return run_generations(worker, spec, commands)

"""The limits of this machine's processes that no run could start under.

A run that lacks descriptors or memory would fail in one worker after the other, each with a
traceback. So the limits are read before anything starts. Only a lower bound of what a run needs is
compared: a run that is let through may still need more.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from math import prod

from holdfast.config.run import RunConfig
from holdfast.errors import UserError
from holdfast.machine.limits import usable_memory
from holdfast.plan.memory.memory_use import known_parameters

MIB = 2**20
WANTED_OPEN_FILES = 65536
"""Descriptors that the soft limit is raised to, if the hard limit allows it. A higher limit
slows down programs that go through all possible descriptors."""
OPEN_FILES_OF_AGENT = 128  # Descriptors of an agent or a mover that has no workers
OPEN_FILES_PER_WORKER = 16  # Further descriptors of an agent or a mover for each worker of its node
TORCH_BYTES = 220 * MIB
"""Memory that torch takes once on a node: the fork server's, which its workers share."""
TORCH_ADDRESS_BYTES = 640 * MIB  # Address space of a process that has imported torch
WORKER_BYTES = 30 * MIB  # Memory that a worker does not share, apart from the training state
STATE_BYTES_PER_PARAMETER = 16
"""Least bytes of the training state for one parameter: value, gradient and two moments."""


@dataclass(frozen=True)
class MemoryNeed:
    """The least memory of a node's workers, in bytes. state: of one worker."""

    workers: int
    state: int

    @property
    def of_node(self) -> int:
        return TORCH_BYTES + self.workers * (WORKER_BYTES + self.state)

    @property
    def of_address_space(self) -> int:
        """The least address space of one worker."""
        return TORCH_ADDRESS_BYTES + self.state


def memory_need(config: RunConfig, workers: int) -> MemoryNeed:
    """Return the least memory for `workers` of a run on one node. On an accelerator the training
    state lies in the accelerator's memory."""
    if config.device != "cpu":
        return MemoryNeed(workers, 0)
    elements = sum(prod(spec.shape) for spec in known_parameters(config))
    ranks = max(degrees.ranks for _, degrees in config.layout.kinds)
    return MemoryNeed(workers, STATE_BYTES_PER_PARAMETER * elements // ranks)


def raise_open_files() -> int:
    """Raise the soft limit of open files towards the hard one; return the soft limit. Processes
    that are started later inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return WANTED_OPEN_FILES
    wanted = WANTED_OPEN_FILES if hard == resource.RLIM_INFINITY else min(WANTED_OPEN_FILES, hard)
    if wanted > soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):  # macOS has another limit that is lower still
            return soft
        return wanted
    return soft


def refuse_low_limits(
    config: RunConfig, workers: int, open_files: int, memory_bytes: int | None = None
) -> None:
    """Raise UserError if a run with `workers` on this node cannot start.

    Args:
        open_files: descriptors that a process may have.
        memory_bytes: memory that this machine or its container has; None: look it up.
    """
    least = OPEN_FILES_OF_AGENT + OPEN_FILES_PER_WORKER * workers
    if open_files < least:
        raise UserError(
            f"a process may have {open_files} open files, and a run with {workers} workers on a "
            f"node needs {least}",
            where="open files",
            remedy="raise the hard limit: ulimit -Hn 4096, or --ulimit nofile=4096 of a container",
        )
    need = memory_need(config, workers)
    for name, option in (("RLIMIT_AS", "-v"), ("RLIMIT_DATA", "-d")):
        soft = resource.getrlimit(getattr(resource, name))[0]
        least_bytes = need.of_address_space if name == "RLIMIT_AS" else WORKER_BYTES + need.state
        if soft != resource.RLIM_INFINITY and soft < least_bytes:
            raise UserError(
                f"a process may have {_mib(soft)} of address space ({name}), and a worker needs "
                f"{_mib(TORCH_ADDRESS_BYTES)} for torch + {_mib(need.state)} of training state = "
                f"{_mib(need.of_address_space)}",
                where="memory",
                remedy=f"raise it: ulimit {option} unlimited",
            )
    present = usable_memory() if memory_bytes is None else memory_bytes
    if present < need.of_node:
        raise UserError(
            f"this machine or container has {_mib(present)}, and its workers need "
            f"{_mib(TORCH_BYTES)} for torch + {need.workers} x ({_mib(WORKER_BYTES)} and "
            f"{_mib(need.state)} of training state) = {_mib(need.of_node)}",
            where="memory",
            remedy="raise the limit, or use fewer workers or a smaller model",
        )


def _mib(number: int) -> str:
    return f"{-(-number // MIB)} MiB"

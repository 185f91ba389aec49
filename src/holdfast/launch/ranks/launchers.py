"""What torchrun, mpirun and srun say about a process that they have started, in its environment.

A launcher starts as many processes as the run has workers. Holdfast starts its workers itself, so
one process of each node, that of local rank 0, becomes the node's agent (`local_ranks.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from holdfast.config.sections.cluster import MAX_NAME_LENGTH
from holdfast.errors import ConfigError
from holdfast.launch.node.node_name import default_node_name

INTERACTIVE_STEP = str(2**32 - 6)  # number of the step in which salloc starts a shell


@dataclass(frozen=True)
class _Variables:
    """Names of a launcher's variables. "" if it has none for this.

    ids: variables that together name one start on one node. steps: what must be set as well, so
    that the rest counts.
    """

    launcher: str
    rank: str
    world: str
    local_rank: str
    local_world: str
    node_rank: str = ""
    nodes: str = ""
    ids: tuple[str, ...] = ()
    needs: str = ""
    same_rank: tuple[str, ...] = ()


_LAUNCHERS = (
    _Variables(
        "torchrun",
        rank="RANK",
        world="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_world="LOCAL_WORLD_SIZE",
        node_rank="GROUP_RANK",
        nodes="GROUP_WORLD_SIZE",
        ids=(
            *("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"),
            *("GROUP_RANK", "TORCHELASTIC_RESTART_COUNT"),
        ),
    ),
    _Variables(
        "mpirun",
        rank="OMPI_COMM_WORLD_RANK",
        world="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world="OMPI_COMM_WORLD_LOCAL_SIZE",
        ids=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        same_rank=("PMIX_RANK",),
    ),
    _Variables(
        "srun",
        rank="SLURM_PROCID",
        world="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        local_world="SLURM_STEP_TASKS_PER_NODE",
        node_rank="SLURM_NODEID",
        nodes="SLURM_STEP_NUM_NODES",
        ids=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID", "SLURM_RESTART_COUNT"),
        needs="SLURM_STEP_ID",  # a batch script has the rest, and is no task of a step
        same_rank=("PMI_RANK", "PMIX_RANK"),
    ),
    _Variables(
        "mpirun",  # MPICH and Intel MPI
        rank="PMI_RANK",
        world="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_world="MPI_LOCALNRANKS",
    ),
)
"""In this order: torchrun may run under srun, and mpirun in a job of Slurm."""


@dataclass(frozen=True)
class LauncherPlace:
    """The place of this process among those that a launcher started.

    nodes: hosts of the start; 0 if the launcher does not say. start: the same for all processes of
    a start on a node. variable: the one that has the world's size, for messages. ranks: of all
    processes on this node, once they are known.
    """

    launcher: str
    rank: int
    world: int
    local_rank: int
    local_world: int
    nodes: int
    node: str
    start: str
    variable: str
    ranks: tuple[int, ...] = ()


def read_launcher(environ: Mapping[str, str]) -> LauncherPlace | None:
    """Return the place that a launcher gave this process; None without one, and for a single
    process. Raises ConfigError for variables that contradict each other."""
    for names in _LAUNCHERS:
        if names.rank in environ and names.world in environ:
            if names.needs and names.needs not in environ:
                continue
            return _read(names, environ)
    return None


def unset_words(environ: Mapping[str, str]) -> str:
    """Return the command after which this process is no launcher's."""
    ranks = [n.rank for n in _LAUNCHERS if n.rank in environ and n.world in environ]
    return f"unset {' '.join(ranks)}"


def refuse_shell(place: LauncherPlace, environ: Mapping[str, str]) -> None:
    """Raises ConfigError in a shell of `srun --pty` or salloc: its other tasks start nothing.

    A step that is started from such a shell inherits the shell's variables. Its processes have no
    terminal, and slurmstepd is their parent."""
    is_shell = "SLURM_PTY_PORT" in environ or environ.get("SLURM_STEP_ID") == INTERACTIVE_STEP
    if place.launcher != "srun" or not is_shell:
        return
    own = psutil.Process()
    parents = [each.name() for each in own.parents()]
    if "slurmstepd" in parents and (parents[0] == "slurmstepd" or not own.terminal()):
        return
    raise ConfigError(
        f"this is an interactive shell of srun or salloc, whose step has {place.world} tasks, and "
        "the other tasks start nothing",
        where="environment",
        remedy=f"train in this shell alone after: {unset_words(environ)}; or have srun start the "
        f"command {place.world} times, inside this allocation",
    )


def _read(names: _Variables, environ: Mapping[str, str]) -> LauncherPlace | None:
    rank, world = _number(names, names.rank, environ), _number(names, names.world, environ)
    if rank >= world:
        raise _error(names, f"{names.rank} is {rank}, and {names.world} is {world}")
    if world == 1:
        return None
    local_rank = _number(names, names.local_rank, environ)
    node_rank = _number(names, names.node_rank, environ) if names.node_rank in environ else 0
    local_world = _local_world(names, node_rank, environ)
    if local_rank >= local_world:
        name = names.local_world
        raise _error(names, f"{names.local_rank} is {local_rank}, and {name} is {local_world}")
    if local_world > world:
        raise _error(names, f"{names.local_world} is {local_world}, and {names.world} is {world}")
    nodes = _number(names, names.nodes, environ) if names.nodes in environ else 0
    if nodes and not nodes <= world - local_world + 1:
        raise _error(
            names, f"{names.nodes} is {nodes}, and {world - local_world} processes are elsewhere"
        )
    if nodes and node_rank >= nodes:
        raise _error(names, f"{names.node_rank} is {node_rank}, and {names.nodes} is {nodes}")
    for other in names.same_rank:
        if other in environ and environ[other] != environ[names.rank]:
            raise _error(names, f"{names.rank} is {rank}, and {other} is {environ[other]}")
    node = default_node_name(environ)
    if names.launcher == "torchrun":  # several may run on one machine
        suffix = f"-{node_rank}"
        node = node[: MAX_NAME_LENGTH - len(suffix)] + suffix
    start = "/".join(environ.get(each, "") for each in names.ids) or f"parent {os.getppid()}"
    return LauncherPlace(
        names.launcher,
        rank,
        world,
        local_rank,
        local_world,
        nodes,
        node,
        f"{names.launcher} {start}",
        names.world,
    )


def _local_world(names: _Variables, node_rank: int, environ: Mapping[str, str]) -> int:
    """Return the number of processes on this node. Slurm writes it as `2(x3),1`."""
    text = environ.get(names.local_world, "")
    if not text.isdigit() and re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", text):
        counts: list[int] = []
        for part in text.split(","):
            count, _, times = part.rstrip(")").partition("(x")
            counts += [int(count)] * int(times or 1)
        if node_rank >= len(counts):
            raise _error(names, f"{names.node_rank} is {node_rank}, and {names.local_world} {text}")
        return counts[node_rank]
    return _number(names, names.local_world, environ)


def _number(names: _Variables, variable: str, environ: Mapping[str, str]) -> int:
    text = environ.get(variable)
    if text is None:
        raise _error(names, f"{names.rank} is set, and {variable} is missing")
    if not text.isdigit():
        raise _error(names, f"{variable} is {text!r}, which is no number")
    return int(text)


def _error(names: _Variables, what: str) -> ConfigError:
    return ConfigError(
        f"the variables of {names.launcher} contradict each other: {what}",
        where="environment",
        remedy=f"start all processes with {names.launcher}, or unset {names.rank} to start one",
    )

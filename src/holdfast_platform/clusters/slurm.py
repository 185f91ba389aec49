"""A Slurm of this user: a controller, and a slurmd for each node. It needs no root and no munge.

Its settings find a lost node within seconds. Any account of this machine may submit jobs to it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess

import psutil

from holdfast.errors import UserError
from holdfast_platform.clusters.cluster import ClusterState, Daemon, is_port_open

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo")
USABLE = ("idle", "mix", "alloc", "comp")
_HOST = "127.0.0.1"
_MIB = 2**20
_COMMAND_S = 20.0
_CONFIG = (
    "ClusterName=holdfast",
    "SlurmctldHost={host}(127.0.0.1)",
    "SlurmctldPort={port}",
    "SlurmUser={user}",
    "SlurmdUser={user}",
    "AuthType=auth/none",
    "AuthInfo=cred_expire=5",
    "CredType=cred/none",
    "StateSaveLocation={folder}/state",
    "SlurmdSpoolDir={folder}/%n",
    "SlurmctldPidFile={folder}/slurmctld.pid",
    "SlurmdPidFile={folder}/%n.pid",
    "ProctrackType=proctrack/linuxproc",
    "TaskPlugin=task/none",
    "JobAcctGatherType=jobacct_gather/none",
    "SelectType=select/cons_tres",
    "SelectTypeParameters=CR_Core",
    "SchedulerType=sched/backfill",
    "SchedulerParameters=sched_interval=2,bf_interval=5,batch_sched_delay=0",
    "MpiDefault=none",
    "ReturnToService=2",
    "JobRequeue=1",
    "SlurmdTimeout=5",
    "SlurmctldTimeout=10",
    "InactiveLimit=0",
    "KillWait=30",
    "MinJobAge=300",
    "MessageTimeout=3",
    "TCPTimeout=1",
    "RebootProgram=/bin/true",
)


class SlurmKind:
    """Implements `DisposableCluster`."""

    head = "slurmctld"
    nodes_outlive_head = True
    starting_nodes = 100
    who_may_use = "any account of this machine can submit jobs to this cluster"

    def check(self) -> None:
        for program in PROGRAMS:
            if _path(program) is None:
                raise UserError(
                    f"{program} of Slurm is not on this machine",
                    where="--kind slurm",
                    remedy="install it with: apt-get install slurmctld "
                    "slurmd slurm-client slurm-wlm-basic-plugins",
                )

    def write_config(self, state: ClusterState) -> None:
        host = socket.gethostname().partition(".")[0]
        folder, ports, user = state.folder, state.ports, psutil.Process().username()
        memory = max(psutil.virtual_memory().total // _MIB // state.nodes, 1)
        lines = [
            line.format(host=host, port=ports[self.head], user=user, folder=folder) + "\n"
            for line in _CONFIG
        ]
        for node in state.node_names:
            (folder / node).mkdir(exist_ok=True)
            lines.append(
                f"NodeName={node} NodeHostname={host} NodeAddr={_HOST} Port={ports[node]} "
                f"CPUs={state.cpus} RealMemory={memory} State=UNKNOWN\n"
            )
        lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n")
        (folder / "state").mkdir(exist_ok=True)
        (folder / "slurm.conf").write_text("".join(lines), "utf-8")

    def daemons(self, state: ClusterState) -> list[Daemon]:
        config = str(state.folder / "slurm.conf")
        environ = {"SLURM_CONF": config, "PATH": _searched()}

        def daemon(name: str, program: str, *options: str) -> Daemon:
            return Daemon(name, (_path(program) or program, "-D", *options, "-f", config), environ)

        nodes = [daemon(node, "slurmd", "-N", node) for node in state.node_names]
        return [daemon(self.head, "slurmctld"), *nodes]

    def is_head_ready(self, state: ClusterState) -> bool:
        return is_port_open(_HOST, state.ports[self.head])

    def usable_nodes(self, state: ClusterState) -> int:
        environ = os.environ | {"SLURM_CONF": str(state.folder / "slurm.conf")}
        command = [_path("sinfo") or "sinfo", "-h", "-N", "-o", "%t"]
        try:
            done = subprocess.run(
                command,
                env=environ,
                capture_output=True,
                text=True,
                timeout=_COMMAND_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return 0
        return sum(word in USABLE for word in done.stdout.split())

    def variable(self, state: ClusterState) -> tuple[str, str]:
        return "SLURM_CONF", str(state.folder / "slurm.conf")


def _searched() -> str:
    """Return PATH with the folders of daemons, which a user's own often lacks."""
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _path(program: str) -> str | None:
    return shutil.which(program, path=_searched())

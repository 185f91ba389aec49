"""A Slurm of several nodes on this machine: a controller and one slurmd for each node.

Needs apt's `slurmctld slurmd slurm-client slurm-wlm-basic-plugins`. It runs as an ordinary user,
without munge and systemd, in a folder of its own with free ports. Nodes are n1, n2 and so on; the
first half of them is behind the switch leaf0, the other half behind leaf1.

`lose` is a node's loss of power: SIGKILL of its slurmd, of the steps' daemons and of all tasks.
`kill_daemon` kills slurmd alone, so its tasks run on.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.support.commands import end_with_starter
from tests.support.ranks import DEADLINE_S, wait_until

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "sinfo", "scancel")
INSTALL = (
    "needs: apt-get install --no-install-recommends slurmctld slurmd slurm-client "
    "slurm-wlm-basic-plugins"
)
SEARCHED = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=5,batch_sched_delay=0
TopologyPlugin=topology/tree
MpiDefault=none
ReturnToService=2
JobRequeue=1
SlurmdTimeout=5
SlurmctldTimeout=10
InactiveLimit=0
KillWait={kill_wait}
MinJobAge=300
MessageTimeout=3
TCPTimeout=1
RebootProgram=/bin/true
"""


def is_installed() -> bool:
    return all(shutil.which(program, path=SEARCHED) for program in PROGRAMS)


class SlurmCluster:
    """A running Slurm; `environment` leads its commands to it."""

    def __init__(self, root: Path, nodes: int, kill_wait: int = 30) -> None:
        self.root, self.names = root, [f"n{number + 1}" for number in range(nodes)]
        self.config = root / "slurm.conf"
        self.environment = os.environ | {"SLURM_CONF": str(self.config), "PATH": SEARCHED}
        self._kill_wait = kill_wait
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def begin(self) -> None:
        """Write the configuration, start all daemons, and wait until every node is idle."""
        (self.root / "state").mkdir()
        self._write_config()
        self.return_controller()
        for name in self.names:
            self.return_node(name)
        self.wait_until(lambda: self.states() == dict.fromkeys(self.names, "idle"), "nodes")

    def end(self) -> None:
        """End all daemons, steps and tasks of this Slurm, by process id."""
        for _ in range(50):
            left = [*self._processes(), *(d for d in self._daemons.values() if d.poll() is None)]
            if not left:
                break
            for process in left:
                with suppress(psutil.Error, ProcessLookupError):
                    process.kill()
            time.sleep(0.1)
        for daemon in self._daemons.values():
            daemon.wait(120)

    # --- faults -----------------------------------------------------------------------------
    def kill_daemon(self, node: str) -> None:
        """Kill slurmd of a node; its steps and tasks run on."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait(120)

    def lose(self, node: str) -> None:
        """The node loses its power."""
        self.kill_daemon(node)
        for process in self.tasks(node):
            with suppress(psutil.Error):
                process.kill()

    def lose_controller(self) -> None:
        """Kill slurmctld, once it has saved all jobs that there are: an unsaved one is lost.

        It saves jobs some seconds after one of them has changed.
        """
        begun = time.time()
        job = self.run("squeue", "-h", "-r", "-o", "%A").split()[0]
        self.run("scontrol", "update", f"JobId={job}", "Comment=saved")
        self.wait_until(lambda: self._last_save() > begun, "Slurm saves its jobs")
        self.kill_daemon("slurmctld")

    def _last_save(self) -> float:
        saved = self.root / "state" / "job_state"
        return saved.stat().st_mtime if saved.exists() else 0.0

    def return_controller(self) -> None:
        self._start("slurmctld", "slurmctld", "-D")

    def return_node(self, node: str) -> None:
        (self.root / node).mkdir(exist_ok=True)
        self._start(node, "slurmd", "-D", "-N", node)

    # --- what there is ----------------------------------------------------------------------
    def states(self) -> dict[str, str]:
        """Return the state of each node in Slurm's short words."""
        lines = self.run("sinfo", "-h", "-N", "-o", "%N %t").splitlines()
        return {words[0]: words[1] for line in lines if len(words := line.split()) == 2}

    def tasks(self, node: str) -> list[psutil.Process]:
        """Return the steps' daemons and the tasks of a node.

        An agent's title replaces the environment that one could know it by, so they are found as
        children of the daemons. Those write to the log of their node's slurmd.
        """
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.name() == "slurmstepd" and self._log(node) in _open_files(process):
                    found += [process, *process.children(recursive=True)]
        return found

    def _log(self, name: str) -> str:
        return str(self.root / f"{name}.log")

    def run(self, *command: str, check: bool = True) -> str:
        """Return what a command of Slurm prints."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=120, check=False
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{command} failed: {done.stderr}\n{self.story()}")
        return done.stdout

    def wait_until(
        self, due: Callable[[], object], what: str, deadline: float = DEADLINE_S
    ) -> None:
        wait_until(due, deadline, lambda: f"{what}\n{self.story()}", pause_s=0.1)

    def story(self) -> str:
        """For a test that failed."""
        texts = [self.run("squeue", "-t", "all", check=False), self.run("sinfo", check=False)]
        texts += [path.read_text("utf-8")[-3000:] for path in [self.root / "slurmctld.log"]]
        return "\n".join(texts)

    def _processes(self) -> list[psutil.Process]:
        """Return all tasks, and what has the environment of this Slurm; not our own."""
        own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
        found = [task for name in self.names for task in self.tasks(name)]
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.pid not in own and process.environ().get("SLURM_CONF") == str(
                    self.config
                ):
                    found.append(process)
        return found

    def _start(self, name: str, program: str, *arguments: str) -> None:
        path = shutil.which(program, path=SEARCHED)
        assert path is not None, INSTALL
        with (self.root / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                [path, *arguments, "-f", str(self.config)],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=end_with_starter,
            )

    def _write_config(self) -> None:
        ports = _free_ports(len(self.names) + 1)
        host, user = socket.gethostname().partition(".")[0], psutil.Process().username()
        lines = [
            _CONFIG.format(
                host=host, port=ports[0], user=user, root=self.root, kill_wait=self._kill_wait
            )
        ]
        lines += [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 "
            "RealMemory=2000 State=UNKNOWN\n"
            for name, port in zip(self.names, ports[1:], strict=True)
        ]
        lines += ["PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP\n"]
        self.config.write_text("".join(lines))
        half = len(self.names) // 2
        (self.root / "topology.conf").write_text(
            f"SwitchName=leaf0 Nodes={','.join(self.names[:half])}\n"
            f"SwitchName=leaf1 Nodes={','.join(self.names[half:])}\n"
            "SwitchName=spine Switches=leaf[0-1]\n"
        )


@contextmanager
def slurm_of(nodes: int, kill_wait: int = 30) -> Iterator[SlurmCluster]:
    """Run a Slurm; none of its processes is left afterwards. Its folder has a short path, for the
    sockets in it."""
    root = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    root.chmod(0o755)
    cluster = SlurmCluster(root, nodes, kill_wait)
    try:
        cluster.begin()
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(root, ignore_errors=True)


def _open_files(process: psutil.Process) -> set[str]:
    return {each.path for each in process.open_files()}


def _free_ports(count: int) -> list[int]:
    with_ports = [socket.socket() for _ in range(count)]
    try:
        for each in with_ports:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in with_ports]
    finally:
        for each in with_ports:
            each.close()

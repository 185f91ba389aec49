"""A node's agent as a process of this machine that outlives the command which started it.

A shell of its own session runs the agent and writes its exit code next to the log. So the end of
an agent can be told from the loss of its machine, by any later command. If the shell is killed, the
agent is found by the session.

    <folder>/<node>.log      what the agent has printed
    <folder>/<node>.exit     its exit code, once it has ended
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from holdfast.errors import RunFolderError
from holdfast.launch.owners.owner import ENDED, NodeState, NodeStatus

START_TIMEOUT_S = 10.0  # Seconds that a shell may take to start its agent
_RUN_AND_NOTE = """\
code="$1"; remove="$2"; shift 2
"$@"
end="$?"
[ -z "$remove" ] || rm -f "$remove"
echo "$end" > "$code"
"""


@dataclass(frozen=True)
class NodeProcess:
    """folder: has the files of the node. process: the shell, as PID@START; a number alone may be
    another process's by now."""

    node: str
    folder: Path
    process: str

    @staticmethod
    def start(
        node: str,
        command: Sequence[str],
        folder: Path,
        environ: Mapping[str, str] | None = None,
        remove: Path | None = None,
    ) -> NodeProcess:
        """Start an agent. environ: further variables of it. remove: a file that goes with it."""
        folder.mkdir(parents=True, exist_ok=True)
        code = folder / f"{node}.exit"
        code.unlink(missing_ok=True)
        with (folder / f"{node}.log").open("ab") as out:
            child = subprocess.Popen(
                ["/bin/sh", "-c", _RUN_AND_NOTE, "sh", str(code), str(remove or ""), *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | dict(environ or {}),
            )
        return NodeProcess(node, folder, f"{child.pid}@{psutil.Process(child.pid).create_time()}")

    @property
    def is_alive(self) -> bool:
        return bool(self._shell() or self._without_shell())

    def status(self) -> NodeStatus:
        if (shell := self._shell()) is not None:
            agents: list[psutil.Process] = []
            with suppress(psutil.Error):
                agents = shell.children()  # a kill of the shell would leave the agent at work
            pid = agents[0].pid if agents else shell.pid
            return NodeStatus(self.node, NodeState.RUNNING, f"process {pid}")
        if agents := self._without_shell():
            detail = f"process {agents[0].pid}; its shell was killed, so its exit code is not kept"
            return NodeStatus(self.node, NodeState.RUNNING, detail)
        code = ""
        with suppress(OSError):
            code = (self.folder / f"{self.node}.exit").read_text("ascii", "replace").strip()
        if code == "0":
            return NodeStatus(self.node, NodeState.FINISHED)
        if code:
            return NodeStatus(self.node, NodeState.FAILED, f"exit code {code}")
        return NodeStatus(self.node, NodeState.LOST, ENDED)

    def leave(self) -> None:
        """Ask the agent to leave the run, as a scheduler does."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while (shell := self._shell()) is not None and time.monotonic() < deadline:
            with suppress(psutil.Error):
                if agents := shell.children():
                    for agent in agents:
                        agent.send_signal(signal.SIGTERM)
                    return
            time.sleep(0.01)  # the shell has not started the agent yet, or it is about to end
        for agent in self._without_shell():
            with suppress(psutil.Error):
                agent.send_signal(signal.SIGTERM)

    def lines(self) -> Iterator[str]:
        """Yield the lines that the agent has printed. Raises RunFolderError without a log."""
        path = self.folder / f"{self.node}.log"
        try:
            yield from path.read_text("utf-8", "replace").splitlines()
        except OSError as error:
            raise RunFolderError(
                f"the log of node {self.node} cannot be read ({error.strerror})",
                where=str(path),
                remedy="read it on that node's machine",
            ) from None

    def _without_shell(self) -> list[psutil.Process]:
        """Return the agent that a killed shell has left. The shell's number names its session,
        and is not given to another process while the session has one."""
        number = self.process.partition("@")[0]
        with suppress(psutil.Error, ValueError):
            if psutil.Process(int(number)).status() != psutil.STATUS_ZOMBIE:
                return []  # the shell, or another process
        left: dict[int, psutil.Process] = {}
        for pid in psutil.pids():
            with suppress(OSError, psutil.Error):
                if str(os.getsid(pid)) == number and str(pid) != number:
                    left[pid] = psutil.Process(pid)
        agents = []
        for process in left.values():
            with suppress(psutil.Error):
                if process.ppid() not in left and self.node in " ".join(process.cmdline()):
                    agents.append(process)
        return agents

    def _shell(self) -> psutil.Process | None:
        number, _, started = self.process.partition("@")
        try:
            found = psutil.Process(int(number))
            if str(found.create_time()) == started and found.status() != psutil.STATUS_ZOMBIE:
                return found
        except (psutil.Error, ValueError):
            pass
        return None

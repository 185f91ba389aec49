"""The nodes of a disturbed run: each has its own agent, started by the real command.

    fleet.start("a")    as a person would: `holdfast train RUN.yaml cluster.node=a ...`
    fleet.kill("a")     SIGKILL to the agent; its children end with it
    fleet.child("a", "mover")
    fleet.ended()       nodes that ended since the last call, with their exit codes

What an agent says goes into a file for each of its lives. An agent does not outlive this process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

MODULES = {
    "mover": "holdfast.checkpoint.mover.main",
    "template": "holdfast.elastic.worker.fork_server",
}
WrapCommand = Callable[[str, list[str]], list[str]]
"""The command line of a node as it is really started: in a network of its own, for one."""


@dataclass
class AgentProcess:
    """One agent, from its start to its end."""

    node: str
    process: subprocess.Popen[bytes]
    is_end_expected: bool = False  # by us


class Fleet:
    """The agents of one run. command: how `holdfast` is called; settings: of every node."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        settings: Sequence[str],
        *,
        node_settings: Callable[[str], Sequence[str]] = lambda node: (),
        wrap_command: WrapCommand = lambda node, line: line,
        environment: dict[str, str] | None = None,
    ) -> None:
        """folder: for what they say. node_settings: more settings for one node."""
        self._folder, self._command, self._settings = folder, list(command), list(settings)
        self._node_settings, self._wrap_command = node_settings, wrap_command
        self._environment = os.environ | (environment or {})
        self._agents: dict[str, AgentProcess] = {}
        self._start_counts: dict[str, int] = {}
        folder.mkdir(parents=True, exist_ok=True)

    # --- who is there -----------------------------------------------------------------------------
    @property
    def alive_nodes(self) -> list[str]:
        return [name for name, life in self._agents.items() if life.process.poll() is None]

    def agent_pid(self, node: str) -> int:
        return self._agents[node].process.pid

    def child_pid(self, node: str, what: str) -> int | None:
        """The process id of an agent's mover or fork server."""
        with suppress(psutil.Error, KeyError):
            for child in psutil.Process(self.agent_pid(node)).children():
                if _runs_module(child, MODULES[what]) and (
                    what != "template" or not _is_forked(child)
                ):
                    return int(child.pid)
        return None

    def worker_pids(self, node: str) -> list[int]:
        """Return the processes forked from the node's fork server, standbys too."""
        with suppress(KeyError):
            return forked_workers(self.agent_pid(node))
        return []

    def process_tree(self, node: str) -> list[int]:
        """The agent and everything that it started, eldest first."""
        with suppress(psutil.Error):
            agent = psutil.Process(self.agent_pid(node))
            return [agent.pid, *(child.pid for child in agent.children(recursive=True))]
        return []

    # --- deeds ------------------------------------------------------------------------------------
    def start(self, *nodes: str) -> None:
        for node in nodes:
            number = self._start_counts[node] = self._start_counts.get(node, 0) + 1
            line = self._wrap_command(
                node,
                [
                    *self._command,
                    f"cluster.node={node}",
                    *self._settings,
                    *self._node_settings(node),
                ],
            )
            with (self._folder / f"{node}.{number}.log").open("wb") as said:
                process = subprocess.Popen(
                    line,
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=self._environment,
                    preexec_fn=die_with_parent(),
                )
            self._agents[node] = AgentProcess(node, process)

    def kill(self, node: str) -> None:
        life = self._agents[node]
        life.is_end_expected = True
        life.process.kill()

    def send_signal(self, node: str, number: signal.Signals) -> None:
        """To the agent and all its children: what stops a machine stops all of it."""
        family = self.process_tree(node)
        for pid in family if number is signal.SIGSTOP else reversed(family):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def expect_end(self, node: str) -> None:
        """It is no surprise when this node ends."""
        self._agents[node].is_end_expected = True

    def take_ended(self) -> list[tuple[str, int, bool]]:
        """(node, exit code, whether that was to be expected) of those that have ended, once."""
        found = []
        for name, life in list(self._agents.items()):
            if (code := life.process.poll()) is not None:
                del self._agents[name]
                found.append((name, code, life.is_end_expected))
        return found

    def last_output_line(self, node: str) -> str:
        """The last line of its newest life."""
        log = self._folder / f"{node}.{self._start_counts[node]}.log"
        lines = log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def kill_all(self) -> None:
        """End all agents."""
        for life in self._agents.values():
            if life.process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(life.process.pid, signal.SIGCONT)
                life.process.kill()
        for life in self._agents.values():
            life.process.wait()
        self._agents.clear()


def forked_workers(agent_pid: int) -> list[int]:
    """Return the processes forked from an agent's fork server, standbys too."""
    with suppress(psutil.Error):
        return [
            child.pid
            for child in psutil.Process(agent_pid).children(recursive=True)
            if _runs_module(child, MODULES["template"]) and _is_forked(child)
        ]
    return []


def die_with_parent() -> Callable[[], None] | None:
    """What a child does before its command: Linux kills it when its starter ends."""
    return _die_with_parent if sys.platform == "linux" else None


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _runs_module(process: psutil.Process, module: str) -> bool:
    """One that has just ended (a fork server that was killed a moment ago) runs nothing."""
    with suppress(psutil.Error):
        return module in process.cmdline()
    return False


def _is_forked(process: psutil.Process) -> bool:
    """Return True if a process that runs the fork server's module is a worker or a standby. When
    their fork server has exited, they are the agent's own children; the fork server leads a
    session."""
    with suppress(OSError):
        return os.getsid(process.pid) != process.pid
    return True

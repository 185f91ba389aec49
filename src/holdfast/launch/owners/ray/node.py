"""The actor of one node of a run on Ray: it starts the agent, watches it, and reports its end.

Ray creates the actor again on another machine if it loses this one. The agent ends with the actor,
so a node never has two agents. An agent that a signal ended is started again here; an exit code is
its own decision, and final.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from holdfast.elastic.notices.ray import NODE as RAY_NODE_VARIABLE
from holdfast.launch.node.node_place import PLACE_VARIABLE
from holdfast.launch.owners.ray.board import RayBoard
from holdfast.launch.owners.ray.plan import NodeReport, RaySpec
from holdfast.policy.placement import FAILURE_DOMAINS
from holdfast.wire.child_command import module_command
from holdfast.wire.lifeline import open_lifeline

POLL_INTERVAL_S = 0.3
LONG_LIFE_S = 60.0
"""An agent that lives this long can start: earlier ends by a signal count no more."""
MAX_SHORT_LIVES = 5
LEAVE_TIMEOUT_S = 300.0
"""An agent that was asked to leave is killed then. It gives up by itself after two minutes."""
PLACE_LABELS = {
    "ray.io/availability-zone": "zone",
    **{kind: kind for kind in FAILURE_DOMAINS if kind != "node"},
}
"""Ray's labels of a machine -> the kind of place that they name."""


class NodeActor:
    """Runs the agent of `node` for `job`. group: id of the placement group of this actor."""

    def __init__(self, job: str, node: str, group: str) -> None:
        self._node, self._group = node, group
        self._board, self._job = RayBoard(job), job
        self._lifeline, self._held = open_lifeline()  # the kernel closes `_held` with this process
        self._context: Any = import_module("ray").get_runtime_context()
        self._host = str(import_module("ray.util").get_node_ip_address())
        self._asked_at = 0.0  # when the agent was asked to leave
        self._head_limit_s = head_limit_s()
        self._is_left_alone = False  # the agent was asked to leave since Ray's head is away
        self._watch = SpecWatch(self._board)
        threading.Thread(target=self._run, name="agent", daemon=True).start()

    def _run(self) -> None:
        short_lives = 0
        while True:
            started = time.monotonic()
            try:
                code = self._run_agent()
            except OSError as error:  # no room for a log, or for a process
                self._report(0, 1, str(error))
                return
            if self._is_left_alone and not self._asked_at:
                self._watch.wait_answer()
                self._is_left_alone = False
                continue
            if code >= 0 or self._asked_at:
                break
            is_short = time.monotonic() - started < LONG_LIFE_S
            short_lives = short_lives + 1 if is_short else 1
            if short_lives >= MAX_SHORT_LIVES:
                break
        self._report(0, code)

    def _run_agent(self) -> int:
        """Start the agent and wait for it; return its exit code, below 0 for a signal."""
        spec = self._watch.newest()
        with self._log_file(spec).open("ab", buffering=0) as out:
            agent = subprocess.Popen(
                module_command(
                    "holdfast.cli.tied_agent", str(self._lifeline), *spec.command(self._node)
                ),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                pass_fds=(self._lifeline,),
                env=self._environment(),
            )
            self._report(agent.pid)
            while agent.poll() is None:
                spec = self._watch.newest()
                if not self._asked_at and (spec.stop or self._node not in spec.nodes):
                    agent.send_signal(signal.SIGTERM)
                    self._asked_at = time.monotonic()
                elif self._asked_at and time.monotonic() > self._asked_at + LEAVE_TIMEOUT_S:
                    agent.kill()
                elif (
                    not self._asked_at
                    and not self._is_left_alone
                    and self._watch.silent_s > leave_after_s(self._head_limit_s)
                ):
                    self._is_left_alone = True
                    text = (
                        f"Ray's head has not answered for {self._watch.silent_s:.0f} s. Ray ends "
                        f"this node after {self._head_limit_s:g} s, so the agent saves and leaves; "
                        "it starts again if the head returns. If it does not, the same 'holdfast "
                        "launch' on another Ray cluster resumes the run\n"
                    )
                    out.write(text.encode())
                    agent.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    agent.wait(POLL_INTERVAL_S)
        return agent.returncode

    def _environment(self) -> dict[str, str]:
        """The notices of the agent need to know Ray's head and our machine."""
        found = dict(os.environ)
        found.pop("OMP_NUM_THREADS", None)  # Ray's own choice; the run file has another key for it
        if place := place_of(dict(self._context.get_node_labels() or {})):
            found.setdefault(PLACE_VARIABLE, place)
        return found | {
            "PYTHONUNBUFFERED": "1",
            "RAY_ADDRESS": str(self._context.gcs_address),
            RAY_NODE_VARIABLE: str(self._context.get_node_id()),
        }

    def _log_file(self, spec: RaySpec) -> Path:
        if spec.logs:
            folder, name = Path(spec.logs), f"{self._node}.log"
        else:
            ray_node = import_module("ray._private.worker").global_worker.node
            folder, name = Path(ray_node.get_logs_dir_path()), f"{self._job}-{self._node}.log"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name

    def _report(self, process: int, code: int | None = None, detail: str = "") -> None:
        machine = str(self._context.get_node_id())
        report = NodeReport(self._group, machine, self._host, process, code, detail)
        while True:
            try:
                return self._board.write_report(self._node, report)
            except Exception as error:
                print(f"Ray's head takes no report: {error}", file=sys.stderr, flush=True)
                time.sleep(POLL_INTERVAL_S)


def place_of(labels: Mapping[str, str]) -> str:
    """Return what a machine's labels say of its place, as `launch/node/node_place.py` reads it."""
    found = {PLACE_LABELS[name]: value for name, value in labels.items() if name in PLACE_LABELS}
    return ",".join(f"{kind}={value}" for kind, value in found.items() if value)


READ_INTERVAL_S = 0.3
RAY_LIMIT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
RAY_LIMIT_S = 60.0
"""Ray's default for that variable: its raylets end so long after their head, with all actors."""
SAVE_S = 20.0
"""Seconds before that limit for an agent's last save. A third of a limit below a minute."""


class SpecWatch:
    """Reads the spec of a job again and again."""

    def __init__(self, board: RayBoard) -> None:
        self._board = board
        self._spec: RaySpec | None = None
        self._answered_at = time.monotonic()
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="spec", daemon=True).start()

    @property
    def silent_s(self) -> float:
        """Seconds since Ray's head has answered."""
        return time.monotonic() - self._answered_at

    def newest(self) -> RaySpec:
        """Return the newest spec; wait until there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self._spec is not None)
            assert self._spec is not None
            return self._spec

    def wait_answer(self) -> None:
        """Wait until Ray's head answers a request of later than now."""
        asked = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._answered_at > asked)

    def _run(self) -> None:
        while True:
            with suppress(Exception):  # Ray's head is away: nothing is asked of us meanwhile
                found = self._board.read_spec()
                with self._changed:
                    self._spec, self._answered_at = found or self._spec, time.monotonic()
                    self._changed.notify_all()
            time.sleep(READ_INTERVAL_S)


def head_limit_s(environment: Mapping[str, str] = os.environ) -> float:
    """Return how long Ray's raylets wait for a head that is away."""
    with suppress(KeyError, ValueError):
        return float(environment[RAY_LIMIT_VARIABLE])
    return RAY_LIMIT_S


def leave_after_s(limit_s: float) -> float:
    """Return after how long without a head an agent has to save and leave."""
    return limit_s - min(SAVE_S, limit_s / 3)

"""The program that speaks to a Ray cluster for `holdfast launch`, `status` and `down`.

    python -m holdfast.launch.owners.ray.job < ORDER

The order is one JSON object (`RayOrder`); so is the answer, `RayAnswer`, on standard output. A
child process does this because Ray's client may hang, and ends its own process when it loses its
head. The parent waits for a limited time, and never imports ray.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from typing import Any

import psutil

from holdfast.elastic.notices.ray_probe import use_token
from holdfast.launch.owners.ray.board import RayBoard, placed_groups
from holdfast.launch.owners.ray.plan import NAMESPACE, JobStatus, RaySpec, kept_groups

CONNECT_TIMEOUT_S = 5.0
START_TIMEOUT_S = 60.0  # Seconds until the supervisor runs: a process of Ray that imports holdfast
CLIENT = "ray://"
HEAD_RESOURCE = "node:__internal_head__"  # Ray gives it to its head machine alone


@dataclass(frozen=True)
class RayOrder:
    """verb: submit, resize, status or stop. spec: for submit and resize; otherwise its job."""

    verb: str
    address: str
    job: str
    spec: dict[str, Any] = field(default_factory=dict)
    runtime_env: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RayAnswer:
    """error: a kind of `errors.py`, with its detail; empty: done. status: of a known job."""

    error: str = ""
    detail: str = ""
    status: str = ""
    nodes: int = 0


class RayRefusalError(Exception):
    """Ray does not do what was asked. kind: one of `errors.py`."""

    def __init__(self, kind: str, detail: str = "") -> None:
        self.kind, self.detail = kind, detail
        super().__init__(f"{kind}: {detail}")


def main() -> None:
    order = RayOrder(**json.load(sys.stdin))
    answer_to = os.dup(1)
    os.dup2(2, 1)  # what ray prints is no part of the answer
    try:
        answer = carry_out(order)
    except RayRefusalError as refusal:
        answer = RayAnswer(refusal.kind, refusal.detail)
    os.write(answer_to, json.dumps(asdict(answer)).encode())


def carry_out(order: RayOrder) -> RayAnswer:
    ray = connect(order.address, order.runtime_env)
    board = RayBoard(order.job)
    if order.verb == "submit":
        return _submit(ray, board, RaySpec.from_json(order.spec))
    known = board.read_spec()
    if order.verb == "status" or known is None:
        status = board.read_status() or JobStatus()
        return RayAnswer(status=json.dumps(status.to_json()) if known is not None else "")
    if order.verb == "resize":
        wanted = RaySpec.from_json(order.spec)
        # The supervisor starts nodes again whose machine was given back.
        placed = {node for group in placed_groups(board.job) for node in group}
        for node, report in board.read_reports().items():
            if report.code is not None and node not in placed:
                board.forget_report(node)
        board.write_spec(replace(wanted, groups=kept_groups(known.groups, wanted.groups)))
    else:
        status = board.read_status() or JobStatus()
        board.write_spec(replace(known, stop=True))
        if status.is_over:
            board.clear()
    return RayAnswer()


def try_connect(address: str) -> None:
    """Raises OSError if nothing listens at Ray's address."""
    host, _, port = address.removeprefix(CLIENT).rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()


def connect(address: str, runtime_env: Mapping[str, Any]) -> Any:
    """Connect to the cluster; return the module ray. Raises RayRefusalError."""
    try:
        try_connect(address)
    except OSError as error:
        raise RayRefusalError("unreachable", str(error.strerror or error)) from None
    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        raise RayRefusalError("absent", str(error)) from None
    here = {} if address.startswith(CLIENT) else {"_node_ip_address": _own_address(address)}
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env=dict(runtime_env) or None,
            **here,
        )
    except Exception as error:  # whatever ray raises becomes a sentence
        text = " ".join(str(error).split())
        raise RayRefusalError(
            "versions" if "ersion mismatch" in text else "refused", text
        ) from None
    return ray


def _own_address(address: str) -> str:
    """Return the address of Ray's node on this machine. Raises RayRefusalError if there is none."""
    use_token()
    state = import_module("ray._private.state").GlobalState()
    options = import_module("ray._raylet").GcsClientOptions
    here = {a.address for found in psutil.net_if_addrs().values() for a in found}
    try:
        state._initialize_global_state(
            options.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
        )
        nodes = [str(n["NodeManagerAddress"]) for n in state.node_table() if n["Alive"]]
    except Exception as error:  # whatever ray raises: this is no head of Ray
        raise RayRefusalError("no_head", " ".join(str(error).split())) from None
    own = [one for one in nodes if one in here or one.startswith("127.")]
    if not own:
        raise RayRefusalError("outside")
    head = address.rpartition(":")[0]
    return head if head in own else own[0]


def _submit(ray: Any, board: RayBoard, spec: RaySpec) -> RayAnswer:
    status = board.read_status()
    if _has_supervisor(ray, spec.job) and not (status is not None and status.is_over):
        raise RayRefusalError("running", spec.job)
    # Raises RayRefusalError if no machine has what a node takes, or one has room for two nodes.
    machines = {str(n["NodeName"]): n["Resources"] for n in ray.nodes() if n["Alive"]}
    taken = ", ".join(f"{name}: {number:g}" for name, number in spec.bundle.items())
    if not spec.is_autoscaled and not any(_times(has, spec.bundle) for has in machines.values()):
        most = {n: max(has.get(n, 0) for has in machines.values()) for n in spec.bundle}
        there = ", ".join(f"{name}: {number:g}" for name, number in most.items())
        raise RayRefusalError("resources", f"{taken} (the most of each: {there})")
    shared = [name for name, has in machines.items() if _times(has, spec.bundle) >= 2]
    if len(spec.groups) > 1 and shared:
        raise RayRefusalError("shared", f"{shared[0]} has room for {taken} more than once")
    # End the supervisor of a job that is over, if it has not done so itself.
    until = time.monotonic() + START_TIMEOUT_S
    while _has_supervisor(ray, spec.job) and time.monotonic() < until:
        with suppress(ValueError):
            ray.kill(ray.get_actor(spec.job, namespace=NAMESPACE), no_restart=True)
        time.sleep(0.1)
    board.clear()
    board.write_spec(spec)
    from holdfast.launch.owners.ray.supervisor import Supervisor

    supervisor = (
        ray.remote(Supervisor)
        .options(
            name=spec.job,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=0,
            resources={HEAD_RESOURCE: 0.001},
        )
        .remote(spec.job)
    )
    try:
        ray.get(supervisor.__ray_ready__.remote(), timeout=START_TIMEOUT_S)
    except Exception as error:
        ray.kill(supervisor, no_restart=True)
        board.clear()
        raise RayRefusalError("start", " ".join(str(error).split())[-300:]) from None
    return RayAnswer(nodes=len(spec.nodes))


def _has_supervisor(ray: Any, job: str) -> bool:
    try:
        ray.get_actor(job, namespace=NAMESPACE)
    except ValueError:
        return False
    return True


def _times(has: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    """How many nodes fit on a machine."""
    return min(int(has.get(name, 0) // number) for name, number in bundle.items())


if __name__ == "__main__":
    main()

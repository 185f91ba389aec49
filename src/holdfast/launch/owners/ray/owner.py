"""Ray as an owner: a detached actor for each node, placed by placement groups.

Everything that needs Ray is done by a child process (`launch/owners/ray/job.py`) and, in the
cluster, by a supervisor and the nodes' actors (`launch/owners/ray/supervisor.py`,
`launch/owners/ray/node.py`). No command has to stay until the run ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from holdfast.errors import ConfigError, RunFolderError
from holdfast.launch.owners.owner import LaunchRequest, NodeStatus, OwnedJob, chosen_nodes
from holdfast.launch.owners.ray.errors import ADDRESS_KEY, explain
from holdfast.launch.owners.ray.job import RayAnswer, RayOrder, try_connect
from holdfast.launch.owners.ray.plan import NODE_MARK, JobStatus, RaySpec, in_order, make_groups
from holdfast.wire.child_command import module_command

ANSWER_TIMEOUT_S = 120.0  # Seconds for Ray to import, connect and start a process
LOG_FOLDER = "launch"


class RayOwner:
    """Implements `MachineOwner`. A job has the run's name and a mark of its run store."""

    def describe(self, request: LaunchRequest) -> str:
        return json.dumps(asdict(_submit_order(request)), indent=2) + "\n"

    def check(self, request: LaunchRequest) -> None:
        """Only whether something listens: to import ray takes longer than to prepare a little."""
        address = _address(request.config.launch.ray.address)
        try:
            try_connect(address)
        except OSError as error:
            raise explain("unreachable", str(error.strerror or error), address) from None

    def submit(self, request: LaunchRequest) -> OwnedJob:
        order = _submit_order(request)
        answer = _ask(order)
        details = {"address": order.address, "logs": str(order.spec["logs"])}
        return OwnedJob("ray", order.job, answer.nodes, details)

    def resize(self, job: OwnedJob, request: LaunchRequest) -> OwnedJob:
        order = RayOrder("resize", job.details["address"], job.job, _spec(request).to_json())
        _ask(order)
        return OwnedJob("ray", job.job, request.all_nodes, job.details)

    def status(self, job: OwnedJob) -> list[NodeStatus]:
        answer = _ask(RayOrder("status", job.details["address"], job.job))
        return list(JobStatus.from_json(json.loads(answer.status)).nodes) if answer.status else []

    def logs(self, job: OwnedJob, node: str) -> Iterator[str]:
        folder = job.details["logs"]
        if not folder:
            raise RunFolderError(
                "the nodes of a run in a bucket print on their own machines",
                where=f"job {job.job}",
                remedy=f"read {job.job}-NODE.log among the logs of Ray's dashboard",
            )
        known = [path.stem for path in Path(folder).glob("node-*.log")]
        for name in chosen_nodes(sorted(known, key=in_order), node):
            for line in Path(folder, f"{name}.log").read_text("utf-8", "replace").splitlines():
                yield line if node else f"{name}: {line}"

    def release(self, job: OwnedJob) -> None:
        _ask(RayOrder("stop", job.details["address"], job.job))


def _spec(request: LaunchRequest) -> RaySpec:
    notices = request.config.cluster.notices
    arguments = request.join_arguments(
        NODE_MARK, *(["cluster.notices=ray"] if notices == "none" else [])
    )
    is_folder = request.location.startswith("/")
    mark = hashlib.sha256(request.location.encode()).hexdigest()[:6]
    return RaySpec(
        job=f"{request.name}-{mark}",
        groups=make_groups(request),
        bundle=request.config.launch.ray.bundle,
        arguments=tuple(arguments),
        logs=f"{request.location}/{LOG_FOLDER}" if is_folder else "",
        is_autoscaled=request.config.launch.ray.autoscaler,
    )


def _submit_order(request: LaunchRequest) -> RayOrder:
    spec = _spec(request)
    settings = request.config.launch.ray
    return RayOrder(
        "submit", _address(settings.address), spec.job, spec.to_json(), settings.runtime_env
    )


def _address(given: str) -> str:
    """Raises ConfigError if no address is known."""
    address = given or os.environ.get("RAY_ADDRESS", "")
    if not address or address == "auto":
        raise ConfigError(
            "the address of Ray's head is not known",
            where=ADDRESS_KEY,
            remedy="use HOST:PORT, as ray start --head prints it, or set RAY_ADDRESS",
        )
    return address


def _ask(order: RayOrder) -> RayAnswer:
    """Have the child carry out an order. Raises ConfigError for what Ray refuses."""
    child = subprocess.Popen(
        module_command("holdfast.launch.owners.ray.job"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = child.communicate(json.dumps(asdict(order)), ANSWER_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise explain("silent", f"{ANSWER_TIMEOUT_S:g}", order.address) from None
    finally:
        child.kill()
        child.wait()
    if not out:
        last = (err.strip().splitlines() or ["no message"])[-1]
        raise explain("ended", last, order.address)
    answer = RayAnswer(**json.loads(out))
    if answer.error:
        is_away = answer.error == "unreachable" and order.verb != "submit"
        raise explain("away" if is_away else answer.error, answer.detail, order.address)
    return answer

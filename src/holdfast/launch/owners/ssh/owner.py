"""Hosts that ssh reaches as an owner: one node on each, in the order of the list.

One ssh for each host starts an agent that does not end with the connection (`node_host.py`).
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.core.json_parsing import parse_json
from holdfast.errors import ConfigError, RunFolderError, UserError
from holdfast.launch.owners.owner import (
    LaunchRequest,
    NodeState,
    NodeStatus,
    OwnedJob,
    chosen_nodes,
)
from holdfast.launch.owners.ssh.host_keys import explain_host_key
from holdfast.launch.owners.ssh.hosts import Host, hosts_of, read_host
from holdfast.launch.owners.ssh.node_host import REPLY_MARK, HostRequest
from holdfast.launch.run.run_folder import run_id
from holdfast.wire.child_command import module_command
from holdfast.wire.secret import read_secret


@dataclass(frozen=True)
class _Node:
    """A node and its host. process: "" before its start."""

    name: str
    host: Host
    process: str = ""


class SshOwner:
    """Implements `MachineOwner` and `CheckingOwner`.

    The details of a job have `node NAME` -> `HOST PID@START`, and how the hosts are reached,
    whatever the run file says later."""

    def describe(self, request: LaunchRequest) -> str:
        details = _way_to_hosts(request)
        lines = []
        for node in _nodes_of(request):
            sent = _start_request(request, node, details["folder"], "")
            shown = f"\n  starts: holdfast {shlex.join(sent.arguments)}"
            lines.append(shlex.join(_host(node, details).command()) + shown)
        return "\n".join(lines) + "\n"

    def check(self, request: LaunchRequest) -> None:
        """Raises UserError, also for a host that does not answer or has no Holdfast."""
        replies = _ask_nodes("check", _nodes_of(request), _way_to_hosts(request))
        for reply in replies:
            if isinstance(reply, UserError):
                raise reply

    def submit(self, request: LaunchRequest) -> OwnedJob:
        return self._started(request, {})

    def resize(self, job: OwnedJob, request: LaunchRequest) -> OwnedJob:
        """Start what is missing; ask the last nodes of the list to leave."""
        wanted = {node.name for node in _nodes_of(request)}
        live = {each.node for each in self.status(job) if each.is_live}
        known = _nodes_in(job)
        leaving = [node for node in known.values() if node.name not in wanted]
        _ask_nodes("leave", leaving, job.details)
        kept = {n: node for n, node in known.items() if n in live and n in wanted}
        return self._started(request, kept)

    def status(self, job: OwnedJob) -> list[NodeStatus]:
        nodes = list(_nodes_in(job).values())
        return [
            NodeStatus(node.name, NodeState.LOST, str(reply))
            if isinstance(reply, UserError)
            else NodeStatus(node.name, NodeState(reply["state"]), _detail(node, reply["detail"]))
            for node, reply in zip(nodes, _ask_nodes("status", nodes, job.details), strict=True)
        ]

    def logs(self, job: OwnedJob, node: str) -> Iterator[str]:
        known = _nodes_in(job)
        nodes = [known[name] for name in chosen_nodes(list(known), node)]
        for one, reply in zip(nodes, _ask_nodes("logs", nodes, job.details), strict=True):
            if isinstance(reply, UserError):
                if node:
                    raise reply
                reply = {"lines": [str(reply)]}
            for line in reply["lines"]:
                yield line if node else f"{one.name}: {line}"

    def release(self, job: OwnedJob) -> None:
        """A host that does not answer is no error here: `status` names it as lost."""
        _ask_nodes("leave", list(_nodes_in(job).values()), job.details)

    def _started(self, request: LaunchRequest, kept: Mapping[str, _Node]) -> OwnedJob:
        """Start the nodes that are not kept. If one cannot start, those just started leave."""
        details, nodes = _way_to_hosts(request), _nodes_of(request)
        secret = _secret_to_send(request)
        new = [node for node in nodes if node.name not in kept]
        asked = [
            (_host(node, details), _start_request(request, node, details["folder"], secret))
            for node in new
        ]
        started, problem = dict(kept), None
        for node, reply in zip(new, ask_all(asked), strict=True):
            if isinstance(reply, UserError):
                problem = problem or reply
            else:
                started[node.name] = replace(node, process=str(reply["process"]))
        if problem is not None:
            _ask_nodes("leave", [n for name, n in started.items() if name not in kept], details)
            raise problem
        for node in nodes:
            found = started[node.name]
            details[f"node {node.name}"] = f"{found.host} {found.process}"
        return OwnedJob("ssh", request.name, request.all_nodes, details)


def _nodes_of(request: LaunchRequest) -> list[_Node]:
    """Return the nodes of the request. Raises ConfigError if there are too few hosts."""
    hosts = hosts_of(request.config.launch.ssh)
    if len(hosts) < request.all_nodes:
        raise ConfigError(
            f"{request.all_nodes} nodes need as many hosts, and launch.ssh has {len(hosts)}",
            where="launch.ssh.hosts",
            remedy=f"name more hosts, or use --nodes {len(hosts) - request.spares}"
            if len(hosts) > request.spares
            else "name them there, or in launch.ssh.hosts_file",
        )
    nodes: dict[str, _Node] = {}
    for host in hosts[: request.all_nodes]:
        plain = re.sub(r"[^A-Za-z0-9._-]", "-", host.name).strip("-.")[:50] or "host"
        name, number = plain, 1
        while name in nodes:
            number += 1
            name = f"{plain}-{number}"
        nodes[name] = _Node(name, host)
    return list(nodes.values())


def _way_to_hosts(request: LaunchRequest) -> dict[str, str]:
    settings = request.config.launch.ssh
    digest = hashlib.sha256(request.location.encode()).hexdigest()[:8]
    return {
        "python": settings.python or sys.executable,
        "options": shlex.join(settings.options),
        "folder": f"{settings.folder}/{request.name}-{digest}",
    }


def _start_request(request: LaunchRequest, node: _Node, folder: str, secret: str) -> HostRequest:
    more = [f"cluster.places={node.host.places}"] if node.host.places else []
    return HostRequest(
        "start",
        node.name,
        folder,
        arguments=tuple(request.join_arguments(node.name, *more)),
        location=request.location,
        run_id=run_id(request.folder) or "",
        secret=secret,
    )


def _secret_to_send(request: LaunchRequest) -> str:
    """Return the secret in digits; "" if the hosts find it in the run folder."""
    if request.secret_file == request.folder / "secret" and "://" not in request.location:
        return ""
    return read_secret(request.secret_file).hex()


def _host(node: _Node, details: Mapping[str, str]) -> SshHost:
    return SshHost(node.host, details["python"], tuple(shlex.split(details["options"])))


def _nodes_in(job: OwnedJob) -> dict[str, _Node]:
    found = {}
    for key, value in job.details.items():
        if key.startswith("node "):
            name, (host, _, process) = key.removeprefix("node "), value.partition(" ")
            found[name] = _Node(name, read_host(host, "launch.json"), process)
    return found


def _ask_nodes(
    do: str, nodes: list[_Node], details: Mapping[str, str]
) -> list[dict[str, Any] | UserError]:
    return ask_all(
        [(_host(n, details), HostRequest(do, n.name, details["folder"], n.process)) for n in nodes]
    )


def _detail(node: _Node, detail: str) -> str:
    return f"{node.host}: {detail}" if detail else str(node.host)


OWN_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
"""After the user's, because ssh takes the first value of an option."""
CONNECTION_FAILED = 255  # ssh's own exit code


@dataclass(frozen=True)
class SshHost:
    """python: its Python. options: further ones of ssh; the port of the host comes before them."""

    host: Host
    python: str
    options: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """Return the command that a request is sent through."""
        remote = shlex.join(
            module_command("holdfast.launch.owners.ssh.node_host", python=self.python)
        )
        *port, host = self.host.arguments
        return ["ssh", *port, *self.options, *OWN_OPTIONS, "-T", host, remote]

    def ask(self, request: HostRequest) -> dict[str, Any]:
        """Return the host's reply. Raises UserError, which names the host."""
        said = json.dumps(request.to_json())
        try:
            done = subprocess.run(
                self.command(), input=said, capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            raise ConfigError(
                "there is no program ssh on the PATH",
                where="launch.on",
                remedy="install OpenSSH's client, or choose another owner",
            ) from None
        for line in reversed(done.stdout.splitlines()):
            if line.startswith(REPLY_MARK):
                reply: dict[str, Any] = parse_json(line.removeprefix(REPLY_MARK))
                if "error" in reply:
                    raise RunFolderError(
                        reply["error"], where=f"host {self.host}", remedy=reply["remedy"]
                    )
                return reply
        what, remedy = self._explain(done.returncode, done.stderr)
        raise RunFolderError(what, where=f"host {self.host}", remedy=remedy)

    def _explain(self, code: int, said: str) -> tuple[str, str]:
        last = (said.strip().splitlines() or ["ssh said nothing"])[-1]
        *port, host = self.host.arguments
        words = [*port, *self.options, host]
        tried = shlex.join(["ssh", *words])
        if code == CONNECTION_FAILED:
            if "Host key verification failed" in said:
                return explain_host_key(said, self.options, self.host)
            if "Could not resolve hostname" in said:
                return "no host of this name is known here", "correct it in launch.ssh"
            if "Permission denied" in said:
                copy = shlex.join(["ssh-copy-id", *words])
                return "it accepts no key of this user", (
                    f"add one with: {copy}, or name the user in launch.ssh.user"
                )
            return f"ssh cannot connect to it ({last})", f"find out why with: {tried}"
        if "No module named" in said and "holdfast" in said:
            return f"{self.python} there has no Holdfast, or an older one", _other_python()
        if code in (126, 127):
            return f"it has no Python at {self.python}", _other_python()
        return f"the command for the node failed there ({last})", f"look there with: {tried}"


def _other_python() -> str:
    return "install it there, or name the Python that has it in launch.ssh.python"


def ask_all(asked: Sequence[tuple[SshHost, HostRequest]]) -> list[dict[str, Any] | UserError]:
    """Ask hosts, all at once; return each reply, or why there is none."""
    from concurrent.futures import ThreadPoolExecutor

    def ask(one: tuple[SshHost, HostRequest]) -> dict[str, Any] | UserError:
        host, request = one
        try:
            return host.ask(request)
        except UserError as error:
            return error

    if not asked:
        return []
    with ThreadPoolExecutor(min(len(asked), 64), "ssh") as threads:
        return list(threads.map(ask, asked))

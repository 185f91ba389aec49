"""The part of an owner that runs on a node's own machine, once for each request.

`python -m holdfast.launch.owners.ssh.node_host` reads one request from stdin and writes one line to
stdout. An owner that has a shell on a machine, such as ssh, needs no more there. The secret comes
with the request and is written into a file of mode 0600, because arguments can be read by every
user.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from holdfast.core.json_parsing import JsonMessage, parse_json
from holdfast.errors import RunFolderError, UserError
from holdfast.launch.owners.node_process import NodeProcess
from holdfast.wire.child_command import module_command
from holdfast.wire.secret import SECRET_FILE_VARIABLE

REPLY_MARK = "holdfast-reply: "
"""Before the reply, because a login shell may print lines of its own."""


@dataclass(frozen=True)
class HostRequest(JsonMessage):
    """do: check, start, status, leave or logs. folder: of logs and secrets; it starts at the home.

    process: the node's, as PID@START; of all but check and start. arguments: of `holdfast`, to
    start with. location: the run store, and run_id what its description must have, if it is a
    folder. secret: in hexadecimal digits; "" if the run store has it.
    """

    do: str
    node: str
    folder: str
    process: str = ""
    arguments: tuple[str, ...] = ()
    location: str = ""
    run_id: str = ""
    secret: str = field(default="", repr=False)
    version: str = field(default_factory=lambda: version("holdfast"))


def answer(request: HostRequest) -> dict[str, Any]:
    """Return the reply to a request. Raises UserError."""
    own = version("holdfast")
    if request.version != own:
        raise RunFolderError(
            f"this host has Holdfast {own}, and the run was begun with {request.version}",
            where="launch.ssh.python",
            remedy=f"install Holdfast {request.version} there, or name a Python that has it",
        )
    if request.do == "check":
        return {}
    folder = Path.home() / request.folder
    process = NodeProcess(request.node, folder, request.process)
    if request.do == "start":
        return {"process": _start(request, folder).process}
    if request.do == "leave":
        process.leave()
        return {}
    if request.do == "logs":
        return {"lines": list(process.lines())}
    status = process.status()
    return {"state": status.state.value, "detail": status.detail}


def _start(request: HostRequest, folder: Path) -> NodeProcess:
    if "://" not in request.location and _run_id(Path(request.location)) != request.run_id:
        raise RunFolderError(
            f"this host does not see the run folder {request.location}",
            where="folder",
            remedy="use a folder on a disk that all hosts share, or a bucket",
        )
    command = module_command("holdfast.cli.main", *request.arguments)
    if not request.secret:
        return NodeProcess.start(request.node, command, folder)
    secret = folder / f"{request.node}.secret"
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        secret.unlink()
    fd = os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "w", encoding="ascii") as file:
        file.write(request.secret + "\n")
    named: Mapping[str, str] = {SECRET_FILE_VARIABLE: str(secret)}
    return NodeProcess.start(request.node, command, folder, named, remove=secret)


def _run_id(folder: Path) -> str | None:
    """Return which run lies there (`run_folder.run_id`, whose imports take a second)."""
    try:
        return str(parse_json((folder / "resolved.json").read_text("utf-8")).get("run_id", ""))
    except (OSError, ValueError, AttributeError):
        return None


def main() -> int:
    """Answer the request on stdin. Exit code 0 also for an error that the reply has."""
    request = HostRequest.from_json(parse_json(sys.stdin.read()))
    try:
        reply = answer(request)
    except UserError as error:
        reply = {"error": error.message, "where": error.where, "remedy": error.remedy}
    print(REPLY_MARK + json.dumps(reply), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""One request to a host by `ssh`, and what its failures mean."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.core.json_parsing import parse_json
from holdfast.errors import ConfigError, RunFolderError, UserError
from holdfast.launch.owners.ssh.node_host import REPLY_MARK, HostRequest
from holdfast.wire.child_command import module_command

OWN_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
"""After the user's, because ssh takes the first value of an option."""
CONNECTION_FAILED = 255  # ssh's own exit code
_FAILURES = (
    (
        "Host key verification failed",
        "its host key is not the one that is known here",
        "connect once with ssh to see both keys, and remove the old one with: ssh-keygen -R {host}",
    ),
    (
        "Could not resolve hostname",
        "no host of this name is known here",
        "correct it in launch.ssh",
    ),
    (
        "Permission denied",
        "it accepts no key of this user",
        "add one with ssh-copy-id, or name the user in launch.ssh.user",
    ),
)
"""What ssh prints -> what it means, what to do."""


@dataclass(frozen=True)
class SshHost:
    """host: as ssh takes it. python: its Python. options: further ones of ssh."""

    host: str
    python: str
    options: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """Return the command that a request is sent through."""
        remote = shlex.join(
            module_command("holdfast.launch.owners.ssh.node_host", python=self.python)
        )
        return ["ssh", *self.options, *OWN_OPTIONS, "-T", self.host, remote]

    def ask(self, request: HostRequest) -> dict[str, Any]:
        """Return the host's reply. Raises UserError, which names the host."""
        try:
            done = subprocess.run(
                self.command(), input=request.to_json(), capture_output=True, text=True, check=False
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
                    raise self._error_from_json(reply)
                return reply
        raise self._failure(done.returncode, done.stderr)

    def _error_from_json(self, reply: dict[str, Any]) -> UserError:
        return RunFolderError(reply["error"], where=f"host {self.host}", remedy=reply["remedy"])

    def _failure(self, code: int, said: str) -> UserError:
        what, remedy = self._explain(code, said)
        return RunFolderError(what, where=f"host {self.host}", remedy=remedy)

    def _explain(self, code: int, said: str) -> tuple[str, str]:
        for words, what, remedy in _FAILURES:
            if code == CONNECTION_FAILED and words in said:
                return what, remedy.format(host=self.host.rpartition("@")[2])
        last = (said.strip().splitlines() or ["ssh said nothing"])[-1]
        tried = shlex.join(["ssh", *self.options, self.host])
        if code == CONNECTION_FAILED:
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

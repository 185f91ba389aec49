"""A disposable cluster: a scheduler of one's own around a run, on this machine.

`DisposableCluster` is what a kind of cluster has to say: its daemons, and when a node is usable.
Starting, ending and finding them again is the same for all kinds (`lifecycle.py`).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from holdfast.errors import UserError

MARK = "HOLDFAST_CLUSTER_FOLDER"
"""Variable of each daemon, with the cluster's folder. What a daemon has started inherits it, so
`down` finds it even when its parent has ended."""


@dataclass(frozen=True)
class ClusterState:
    """A cluster as it is noted in the state folder.

    folder: of its configuration, logs and sockets; nothing of it is elsewhere.
    ports: by daemon. processes: by daemon, as PID@START; a number alone may be another's by now.
    """

    name: str
    kind: str
    nodes: int
    cpus: int
    folder: Path
    ports: Mapping[str, int] = field(default_factory=dict)
    processes: Mapping[str, str] = field(default_factory=dict)

    @property
    def node_names(self) -> list[str]:
        return [f"n{number}" for number in range(1, self.nodes + 1)]


@dataclass(frozen=True)
class Daemon:
    """A process that stays in the foreground. environ: further variables of it."""

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)


class DisposableCluster(Protocol):
    """A kind of cluster. `head` is the daemon that all nodes depend on.

    nodes_outlive_head: if False, all nodes start again with a head that was lost.
    starting_nodes: how many nodes may start at the same time.
    who_may_use: whom the cluster lets in, as a sentence.
    """

    head: str
    nodes_outlive_head: bool
    starting_nodes: int
    who_may_use: str

    def check(self) -> None:
        """Raises UserError if a program is missing here."""

    def write_config(self, state: ClusterState) -> None: ...

    def daemons(self, state: ClusterState) -> list[Daemon]:
        """Return the head, then a daemon for each node, by the node's name."""

    def is_head_ready(self, state: ClusterState) -> bool: ...
    def usable_nodes(self, state: ClusterState) -> int: ...

    def variable(self, state: ClusterState) -> tuple[str, str]:
        """Return name and value of the variable that leads commands to the cluster."""


def free_ports(names: list[str]) -> dict[str, int]:
    """Return a port for each name, free at this moment on all addresses."""
    held = [socket.socket() for _ in names]
    try:
        for each in held:
            each.bind(("", 0))
        return {n: each.getsockname()[1] for n, each in zip(names, held, strict=True)}
    finally:
        for each in held:
            each.close()


def is_port_open(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


# --- notes ----------------------------------------------------------------------------------------
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")


def check_name(name: str) -> None:
    """Raises UserError for a name that cannot be a file's."""
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{name!r} is no name of a cluster",
            where="command line, name",
            remedy="use small letters, digits and '-', such as my-slurm",
        )


class ClusterStates:
    """The state folder."""

    def __init__(self) -> None:
        base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        self.folder = Path(base) / "holdfast" / "clusters"

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def names(self) -> list[str]:
        return sorted(each.stem for each in self.folder.glob("*.json"))

    def read(self, name: str) -> ClusterState | None:
        """Return None if there is no such cluster. Raises UserError for a file that is none."""
        path = self.path(name)
        try:
            found: dict[str, Any] = json.loads(path.read_text("utf-8"))
            return ClusterState(**(found | {"folder": Path(found["folder"])}))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError):
            raise UserError(
                "this is no note of a cluster",
                where=str(path),
                remedy="remove the file, and end the processes of that cluster by hand",
            ) from None

    def write(self, state: ClusterState) -> None:
        """Replace the note in one step."""
        self.folder.mkdir(parents=True, exist_ok=True)
        new = self.folder / f".{state.name}.new"
        new.touch(mode=0o600)
        content = asdict(state) | {"folder": str(state.folder)}
        new.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
        new.replace(self.path(state.name))

    def remove(self, name: str) -> None:
        self.path(name).unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other commands of this user from changing clusters meanwhile. Raises UserError if
        one is at work."""
        self.folder.mkdir(parents=True, exist_ok=True)
        held = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise UserError(
                "another 'holdfast cluster' is at work",
                where=str(self.folder),
                remedy="call this again when it has ended",
            ) from None
        finally:
            os.close(held)

"""Notes of clusters: $XDG_STATE_HOME/holdfast/clusters/NAME.json, readable by their user alone."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast.errors import UserError
from holdfast_platform.clusters.cluster import ClusterState

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

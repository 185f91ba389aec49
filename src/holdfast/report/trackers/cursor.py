"""The durable position of one tracker: `trackers/NAME/cursor.json` in the run folder.

It says how far the journal was read and which steps were delivered. A lock on a file next to it
keeps two processes from serving the same tracker of the same run.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.core.json_parsing import parse_json
from holdfast.errors import RunFolderError

logger = logging.getLogger(__name__)

CURSOR_FILE, LOCK_FILE = "cursor.json", "lock"
_VERSION = 1


@dataclass
class Cursor:
    """A tracker's position. `save` makes it durable."""

    path: Path
    key: str  # the run's key in other programs
    positions: dict[str, int] = field(default_factory=dict)  # segment -> bytes of it that were read
    curve: dict[str, Any] | None = None  # `Curve.to_json`

    @staticmethod
    def load(folder: Path) -> Cursor:
        """Return the stored cursor of a tracker's folder; a new one if there is none.

        Raises RunFolderError if the file is not a cursor."""
        path = folder / CURSOR_FILE
        try:
            value = parse_json(path.read_text("utf-8"))
        except FileNotFoundError:
            return Cursor(path, secrets.token_hex(8))
        except ValueError:
            raise _not_a_cursor(path) from None
        try:
            positions = {str(key): int(size) for key, size in value["positions"].items()}
            return Cursor(path, str(value["key"]), positions, dict(value["curve"]))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise _not_a_cursor(path) from None

    def save(self, curve: Mapping[str, Any], positions: Mapping[str, int] | None = None) -> None:
        """Store what was delivered, and the positions if they are given."""
        self.curve = dict(curve)
        if positions is not None:
            self.positions = dict(positions)
        value = {
            "v": _VERSION,
            "key": self.key,
            "positions": self.positions,
            "curve": self.curve,
        }
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)


def _not_a_cursor(path: Path) -> RunFolderError:
    return RunFolderError(
        "this is not the position of a tracker",
        where=str(path),
        remedy="remove the file; the tracker then gets the entire run again",
    )


def lock_tracker(folder: Path) -> int | None:
    """Lock a tracker's folder until this process ends; None if another process has the lock."""
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:  # a file system without locks
        logger.warning("%s cannot be locked (%s)", folder, error.strerror)
    return descriptor

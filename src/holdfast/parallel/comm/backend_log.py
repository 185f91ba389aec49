"""What a device's backend says of its connections, kept in this process's memory.

NCCL writes it to the file that a variable names, when the first communicator is made. A worker
writes to no disk, so the file has no name in any folder. Create it after the fork.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping


class BackendLog:
    """A backend's log. settings: environment that makes the backend write. file_variable: names
    its file there."""

    def __init__(self, settings: Mapping[str, str], file_variable: str) -> None:
        self._fd = os.memfd_create("backend-log") if sys.platform == "linux" else -1
        self._read_bytes = 0
        if self._fd >= 0:
            # The backend reads them at its first call.
            os.environ.update({**settings, file_variable: f"/proc/self/fd/{self._fd}"})

    def read_new(self) -> str:
        """Return what was written since the last call."""
        if self._fd < 0:
            return ""
        size = os.fstat(self._fd).st_size
        text = os.pread(self._fd, size - self._read_bytes, self._read_bytes)
        self._read_bytes += len(text)
        return text.decode("utf-8", "replace")

"""Keeps secrets of other programs out of what a tracker's process prints.

Keys and passwords stay in the environment, and libraries may print them. So a thread reads all that
this process and its children print, replaces secrets, and passes the lines on.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping

_SECRET_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_USER_INFO = re.compile(r"(\w://)[^/\s@]+@")
_MIN_SECRET_CHARS = 6  # Shorter values are words of a log, and no secrets
HIDDEN = "***"
_CLOSE_TIMEOUT_S = 2.0


def redact(text: str, environment: Mapping[str, str]) -> str:
    """Return the text without the values of secret variables, and without users in addresses."""
    values = {
        value
        for name, value in environment.items()
        if _SECRET_NAMES.search(name) and len(value) >= _MIN_SECRET_CHARS
    }
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return _USER_INFO.sub(rf"\1{HIDDEN}@", text)


class OutputFilter:
    """Redacts the standard output and error of this process, from `start` on."""

    def __init__(self, environment: Mapping[str, str], target: int) -> None:
        """target: the descriptor that gets the output."""
        self._environment, self._target = environment, target
        self._thread = threading.Thread(target=self._pass_on, name="output", daemon=True)

    def start(self) -> None:
        self._read_fd, write_fd = os.pipe()
        os.dup2(write_fd, 1)
        os.dup2(write_fd, 2)
        os.close(write_fd)
        self._thread.start()

    def close(self) -> None:
        """Pass the rest on. Output after this goes nowhere."""
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)  # the last writer, unless a child of this process lives
        os.close(nothing)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _pass_on(self) -> None:
        with os.fdopen(self._read_fd, "r", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                data = redact(line, self._environment).encode()
                try:
                    os.write(self._target, data)
                except OSError:
                    continue  # a full disk, say: the pipe must be read anyway

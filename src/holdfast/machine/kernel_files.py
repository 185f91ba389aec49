"""What this machine says of its devices: the kernel's small files (below `/sys`), and tools."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path


def ask_tool(command: Sequence[str], timeout_s: float) -> str:
    """Return what a driver's tool prints; "" if it is not there, fails or hangs."""
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout


def read_text(file: Path) -> str:
    """Return the content; "" if there is none."""
    try:
        return file.read_text("utf-8").strip()
    except OSError:
        return ""


def read_property(file: Path, name: str) -> int:
    """Return the number in the line `name NUMBER`; 0 if there is none."""
    found = re.search(rf"^{name}\s+(\d+)", read_text(file), re.MULTILINE)
    return 0 if found is None else int(found[1])

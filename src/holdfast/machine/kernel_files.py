"""Small files in which the kernel describes devices (below `/sys`)."""

from __future__ import annotations

import re
from pathlib import Path


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

"""The gate at which a process of `holdfast score` waits until its node joins.

The harness starts the processes of a node before the clock of a scenario. They load what they need,
and wait here. So the start of interpreters, which no compression of time shortens, lies outside of
the measured time. A waiting process takes no time of a core.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

READY_VARIABLE = "HOLDFAST_SCORE_READY"
"""The file that a process makes once it has loaded what it needs."""


def wait_at_gate() -> list[str]:
    """Say that this process is ready, and wait until its node joins.

    Returns the words that the harness gives then. Without a harness it returns none at once. If the
    harness ends, so does this process."""
    ready = os.environ.pop(READY_VARIABLE, "")
    if not ready:
        return []
    Path(ready).touch()
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    return line.split()

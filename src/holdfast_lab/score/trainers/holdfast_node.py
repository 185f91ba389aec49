"""A node of `holdfast score --trainer holdfast`: the agent of `holdfast train`, with a gate.

    python -m holdfast_lab.score.trainers.holdfast_node RUN_FILE KEY=VALUE...

The agent, its mover and its fork server load what they need. Then they wait until the node joins.
"""

from __future__ import annotations

import sys
from pathlib import Path

from holdfast.api.start import start
from holdfast_lab.score.trainers.gate import wait_at_gate


def main() -> int:
    return start(Path(sys.argv[1]), sys.argv[2:], before_joining=_wait).exit_code


def _wait() -> None:
    wait_at_gate()


if __name__ == "__main__":
    sys.exit(main())

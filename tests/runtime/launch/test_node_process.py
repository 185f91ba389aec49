"""The process of a node: an agent that outlives its command, and its shell."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from holdfast.launch.owners.node_process import NodeProcess
from holdfast.launch.owners.owner import ENDED, NodeState
from tests.support.ranks import wait_until

AGENT = "import signal; print('up', flush=True); signal.pause()"


def test_an_agent_whose_shell_was_killed_is_seen_and_released(tmp_path: Path) -> None:
    node = NodeProcess.start("node-7", [sys.executable, "-c", AGENT, "node-7"], tmp_path)
    wait_until(lambda: (tmp_path / "node-7.log").read_text() == "up\n")
    before = node.status().detail
    os.kill(int(node.process.partition("@")[0]), signal.SIGKILL)
    wait_until(lambda: node.status().detail.startswith(f"{before}; "))
    assert node.is_alive, "another launch does not start a second one"
    node.leave()
    wait_until(lambda: not node.is_alive)
    assert (node.status().state, node.status().detail) == (NodeState.LOST, ENDED)

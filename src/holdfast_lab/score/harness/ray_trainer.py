"""Ray Train as a trainer of `holdfast score`: each node is a raylet with one CPU.

Ray's head and the driver run outside of the nodes, so no fault hits them. Ray Train v2 restarts the
group on the nodes that are there, and resizes it when nodes come.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from holdfast.launch.node.fleet import die_with_parent
from holdfast.wire.child_command import module_command
from holdfast_lab.score.harness.node_processes import LineReader, kill_tree, process_tree
from holdfast_lab.score.harness.torchrun_trainer import flip_bytes, why_no_module
from holdfast_lab.score.harness.trainer import TrainerRun, Workplace
from holdfast_lab.score.record import Commit

_RESIZE_S = 60.0  # ray Train's own default between two looks for new nodes, which is divided by k


class RayTrainer:
    name = "ray-train"

    def why_unavailable(self, python: str) -> str:
        missing = (why_no_module(python, name, "ray[train]") for name in ("ray", "pyarrow"))
        return next(filter(None, missing), "")

    def open(self, workplace: Workplace) -> TrainerRun:
        return _RayRun(workplace)


class _RayRun:
    def __init__(self, workplace: Workplace) -> None:
        self._at = workplace
        self._reader = LineReader(workplace.folder / "lines")
        command = module_command(
            "holdfast_lab.score.trainers.ray_driver",
            str(workplace.folder),
            str(workplace.places),
            str(max(1.0, _RESIZE_S / workplace.k)),
            python=workplace.python,
        )
        with (workplace.folder / "driver.log").open("ab") as log:
            self._driver = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **workplace.environment()},
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )

    def _command(self, word: str, node: str) -> None:
        assert self._driver.stdin is not None
        with suppress(BrokenPipeError):
            self._driver.stdin.write(f"{word} {node}\n".encode())
            self._driver.stdin.flush()

    def start(self, nodes: Sequence[str]) -> None:
        for node in nodes:
            self._command("start", node)

    def kill(self, node: str) -> None:
        for root in self._raylets(node):
            kill_tree(root)
        self._command("kill", node)

    def warn(self, node: str, seconds: float) -> None:
        """Ray Train on a cluster without a provider knows no notices."""

    def worker_pids(self, node: str) -> list[int]:
        return [pid for root in self._raylets(node) for pid in process_tree(root)[1:]]

    def _raylets(self, node: str) -> list[int]:
        file = self._at.folder / "raylets"
        rows = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return [int(pid) for name, pid in rows if name == node][-1:]

    def commits(self) -> list[Commit]:
        return self._reader.commits()

    def corrupt_checkpoint(self) -> bool:
        files = list((self._at.folder / "ray").glob("score/checkpoint*/state"))
        return flip_bytes(sorted(files, key=lambda path: path.stat().st_mtime)[-1:])

    def stop(self) -> None:
        kill_tree(self._driver.pid)
        self._driver.wait()

"""torchft as a trainer of `holdfast score`: each node is a replica group of one process.

Its lighthouse runs outside of the nodes, so no fault hits it. It gives a replica up after half a
second. torchft keeps no durable state by itself. If all replicas are lost, it starts again.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.wire.child_command import module_command
from holdfast_lab.score.harness.node_processes import ParkedNodes, free_port
from holdfast_lab.score.harness.torchrun_trainer import why_no_module
from holdfast_lab.score.harness.trainer import TrainerRun, Workplace

_LIGHTHOUSE = (
    "import time\nfrom torchft.coordination import LighthouseServer as L\n"
    "server = L(bind='{address}:{port}', min_replicas=1, join_timeout_ms={join_ms}, "
    "quorum_tick_ms=20, heartbeat_timeout_ms=500)\nwhile True: time.sleep(60)"
)
_JOIN_TIMEOUT_MS = 60_000  # torchft's own default, which is divided by k


class TorchftTrainer:
    name = "torchft"
    obeys_network = True

    def why_unavailable(self, python: str) -> str:
        return why_no_module(python, "torchft", "holdfast[torchft]")

    def open(self, workplace: Workplace) -> TrainerRun:
        return _TorchftRun(workplace)


class _TorchftRun(ParkedNodes):
    def __init__(self, workplace: Workplace) -> None:
        super().__init__(workplace)
        port = free_port()
        self._lighthouse = f"http://{workplace.helper_address}:{port}"
        self._free_places = list(range(workplace.places))
        self._place_of: dict[str, int] = {}
        if workplace.is_resilient:
            join_ms = max(500, round(_JOIN_TIMEOUT_MS / workplace.k))
            code = _LIGHTHOUSE.format(address=workplace.helper_address, port=port, join_ms=join_ms)
            self._processes.start_helper("lighthouse", [workplace.python, "-c", code])
        else:
            self._lighthouse = f"file://{workplace.folder / 'meeting'}"

    def _command(self, node: str) -> list[str]:
        return module_command(
            "holdfast_lab.score.trainers.torchft_replica",
            str(self._at.places),
            self._lighthouse,
            str(self._at.folder),
            self._at.address(node),
            python=self._at.python,
        )

    def start(self, nodes: Sequence[str]) -> None:
        for node in nodes:
            place = self._place_of[node] = self._free_places.pop(0)
            self._processes.start(node, self._command(node), str(place))

    def kill(self, node: str) -> None:
        super().kill(node)
        if node in self._place_of:
            self._free_places.append(self._place_of.pop(node))

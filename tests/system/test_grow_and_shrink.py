"""A run of two nodes grows and shrinks, with an axis of the layout across nodes.

Every two workers are a replica of two ranks on two nodes, and an odd one is a replica of its own.
So replicas are unequal.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from holdfast.elastic.protocol.fault_orders import FaultOrders
from holdfast.events import GenerationStarted
from tests.support.commands import within
from tests.support.nodes import Nodes, nodes_of

STEPS = 40
SETTINGS = (
    f"train.steps={STEPS}",
    "train.batch_size=8",
    "train.evaluate.every=0",
    "train.precision=float64",
    "model.layers=2",
    "model.kv_heads=2",
    "checkpoint.every_steps=20",
    "checkpoint.memory_every_steps=1",
)
NODES = ("cluster.min_nodes=2", "cluster.gather_seconds=3", "layout.workers=6")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "come", "go"), [("tp", "c", 1), ("tp", "cde", 2), ("pp", "cde", 2)]
)
def test_two_nodes_become_more_and_then_fewer(
    axis: str,
    come: str,
    go: int,
    run_file: Path,
    undisturbed: dict[int, float],
    tmp_path: Path,
) -> None:
    """They go no further than a gate while nodes come, and are lost."""
    gate = FaultOrders(tmp_path / "gate")
    gate.prepare(3)
    settings = (*SETTINGS, *NODES, f"cluster.faults={gate.folder}", f"layout.{axis}=2")
    with nodes_of(run_file, tmp_path / "run", *settings) as nodes:
        nodes.start("a", "b")
        nodes.wait_step(3, nodes={"a", "b"})
        nodes.join(*come)
        everybody = {"a", "b", *come}
        nodes.wait_generation(everybody)
        gate.open_gate(20)
        nodes.wait_step(20, nodes=everybody)
        grown = nodes.newest
        lost = [name for name in sorted(everybody) if name != nodes.leader][:go]
        gate.open_gate(30)
        for name in lost:
            nodes.kill(name)
        nodes.wait_generation(everybody - set(lost), grown)
        rungs = {e.topology["generation"]: e.rung for e in nodes.events(GenerationStarted)}
        assert rungs[grown] == 5
        gate.open_gate(STEPS)
        assert set(nodes.end().values()) == {0}, nodes.story()
        losses = nodes.losses()
        assert sorted(losses) == sorted(undisturbed), nodes.story()
        np.testing.assert_allclose(
            [losses[step] for step in sorted(losses)],
            [undisturbed[step] for step in sorted(undisturbed)],
            rtol=1e-10,
        )
        sizes = {2, len(everybody), len(everybody) - go}
        assert _replicas(nodes, sizes) == {size: (size + 1) // 2 for size in sizes}
        audit = within("data", "audit", nodes.outside).succeeds()
        assert "none missing, none twice" in audit.out


def _replicas(nodes: Nodes, sizes: set[int]) -> dict[int, int]:
    """Ranks of a generation -> its replicas."""
    found = {}
    for event in nodes.events(GenerationStarted):
        replicas = event.topology["replicas"]
        found[sum(len(replica["ranks"]) for replica in replicas)] = len(replicas)
    return {size: found[size] for size in sizes if size in found}

"""Runs of several nodes grow, shrink and keep to racks, with an axis across nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.elastic.protocol.fault_orders import FaultOrders
from holdfast.events import GenerationStarted
from tests.support.nodes import Nodes, nodes_of, prepared

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
    axis: str, come: str, go: int, run_file: Path, undisturbed: dict[int, float], tmp_path: Path
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
        nodes.assert_same_run(undisturbed, 1e-10)
        sizes = {2, len(everybody), len(everybody) - go}
        assert _replicas(nodes, sizes) == {size: (size + 1) // 2 for size in sizes}


def _replicas(nodes: Nodes, sizes: set[int]) -> dict[int, int]:
    """Ranks of a generation -> its replicas."""
    found = {}
    for event in nodes.events(GenerationStarted):
        replicas = event.topology["replicas"]
        found[sum(len(replica["ranks"]) for replica in replicas)] = len(replicas)
    return {size: found[size] for size in sizes if size in found}


RACKS = {"n1": "ra", "n2": "rb", "n3": "ra", "n4": "rb", "n5": "ra"}


def racks_by_replica(found: GenerationStarted) -> list[set[str]]:
    names = found.topology["nodes"]
    return [
        {RACKS[names[rank]] for rank in replica["ranks"]} for replica in found.topology["replicas"]
    ]


@pytest.mark.slow
def test_replicas_of_two_nodes_keep_to_a_rack_and_a_lost_node_is_replaced_from_it(
    tmp_path: Path,
) -> None:
    """A replica takes two nodes. By their names alone, each would have one of each rack."""
    settings = (
        "model.layers=2",
        "layout.workers=4",
        "layout.pp=2",
        "train.steps=100000",
        "cluster.min_nodes=4",
    )
    with nodes_of(prepared(tmp_path), tmp_path / "run", *settings) as run:
        for name in ("n1", "n2", "n3", "n4"):
            run.start(name, settings=[f"checkpoint.machine.rack={RACKS[name]}"])
        run.wait_generation({"n1", "n3", "n2", "n4"})
        assert racks_by_replica(run.events(GenerationStarted)[-1]) == [{"ra"}, {"rb"}], run.story()
        run.start("n5", settings=[f"checkpoint.machine.rack={RACKS['n5']}"])
        run.kill("n3")
        run.wait_generation({"n1", "n5", "n2", "n4"})
        assert racks_by_replica(run.events(GenerationStarted)[-1]) == [{"ra"}, {"rb"}], run.story()

"""A run of several nodes with `layout: auto` uses the workers that the run file names, and the
search lays out what a loss leaves.

The cluster file says that the nodes have slow links. So the search prefers pipelines, whose
messages are small. One pipeline is predicted to be faster than two, but the run file asks for four
workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.elastic.protocol.fault_orders import FaultOrders
from holdfast.events import GenerationStarted, SettingIgnored
from holdfast.layout import Topology
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
CLUSTER = """
pools:
  slow: {device: cpu, devices: 1, nodes: 4, outside: {gbit_s: 0.1, latency_us: 100}}
"""


def _shapes(nodes: Nodes) -> list[list[tuple[int, ...]]]:
    """Of each generation, the meshes of its replicas."""
    started = [event.topology for event in nodes.events(GenerationStarted)]
    return [[r.mesh_shape for r in Topology.from_json(found).replicas] for found in started]


@pytest.mark.slow
def test_what_is_left_is_laid_out_by_the_search(
    run_file: Path, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(CLUSTER)
    gate = FaultOrders(tmp_path / "gate")
    gate.prepare(10)
    settings = ("layout.mode=auto", f"plan.cluster={cluster}", f"cluster.faults={gate.folder}")
    with nodes_of(run_file, tmp_path / "run", *SETTINGS, *settings, "layout.workers=4") as nodes:
        nodes.start(*"abcd")
        nodes.wait_generation({*"abcd"})
        nodes.wait_step(10, nodes={*"abcd"})
        pipe = (2, 1, 1, 1)
        assert _shapes(nodes)[-1] == [pipe, pipe], nodes.story()
        lost = next(name for name in "dcba" if name != nodes.leader)
        before = nodes.newest
        nodes.kill(lost)
        gate.open_gate(20)
        nodes.wait_step(20, after=before)
        assert _shapes(nodes)[-1] == [pipe], nodes.story()
        keeps = nodes.leader
        for name in sorted({*"abcd"} - {lost, keeps}):
            nodes.kill(name)
        gate.open_gate(STEPS)
        assert nodes.end()[keeps] == 0, nodes.story()
        assert _shapes(nodes)[-1] == [(1, 1, 1, 1)], nodes.story()
        assert "layout.mode" not in [event.key for event in nodes.events(SettingIgnored)]
        nodes.assert_same_run(undisturbed, 1e-10)
        said = within("report", nodes.outside).succeeds().err
        assert f"generation {before + 1}: 1 x pp 2 after 2 x pp 2; planned" in said

"""Nodes that say where they stand: real agents, and replicas that keep to a rack."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.events import GenerationStarted
from tests.support.nodes import nodes_of, prepared

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

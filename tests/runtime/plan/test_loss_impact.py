"""What a loss leaves, against a count of single elements."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.config.run import RunConfig
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.state_table import local_boxes, state_table
from holdfast.elastic.node.launch_specs import plan_topology
from holdfast.errors import LayoutError
from holdfast.plan.placing.loss_impact import impact_of_loss

LAYOUTS = (
    {"workers": 4},
    {"workers": 4, "pp": 2, "tp": 2},
    {"workers": 4, "dp_shard": 2},
    {"workers": 6, "pp": 3},
    {"workers": 4, "tp": 4},
    {"workers": 5, "replicas": [{"pp": 3}, {"pp": 2}]},
    {"workers": 6, "replicas": [{"tp": 2}, {"dp_shard": 2}, {"pp": 2, "stages": [1, 2]}]},
)


def config(layout: dict[str, object], zero: int = 3) -> RunConfig:
    return RunConfig.model_validate(
        {
            "data": {"sequence_length": 16},
            "model": {
                "preset": None,
                "layers": 3,
                "dim": 8,
                "heads": 4,
                "kv_heads": 2,
                "ffn_dim": 8,
                "vocab_size": 11,
                "tied_embeddings": True,
            },
            "train": {"batch_size": 32, "microbatch_size": 2},
            "layout": {**layout, "zero": zero},
        }
    )


def elements(boxes: tuple[Box, ...]) -> set[tuple[object, ...]]:
    return {
        (box.name, *place)
        for box in boxes
        for place in product(
            *(range(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))
        )
    }


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(LAYOUTS), st.data())
def test_gone_is_what_no_rank_outside_holds(layout: dict[str, object], data: st.DataObject) -> None:
    asked = config(layout)
    topology = plan_topology(asked, 1, "here")
    everyone = range(topology.world_size)
    lost = data.draw(st.frozensets(st.sampled_from(everyone), min_size=1))
    loss = impact_of_loss(asked, topology, lost)

    table = state_table(asked.model)
    held = [elements(local_boxes(topology, table, rank)) for rank in everyone]
    left = set[tuple[object, ...]]().union(*(held[r] for r in everyone if r not in lost))
    everything = set[tuple[object, ...]]().union(*held)
    assert loss.of == 4 * len(everything)
    assert loss.gone == 4 * len(everything - left)
    positions = {
        p for s in table if any(e[0] == s.name for e in everything - left) for p in s.positions
    }
    assert loss.positions == tuple(sorted(positions))

    assert sorted(loss.broken + loss.whole) == list(range(len(topology.replicas)))
    for index in loss.whole:
        assert lost.isdisjoint(topology.replicas[index].ranks)
    alive = {r for index in loss.broken for r in topology.replicas[index].ranks} - lost
    assert set(loss.waiting) == alive


def test_a_whole_replica_left_means_nothing_is_gone() -> None:
    asked = config({"workers": 8, "pp": 2, "dp_shard": 2})
    loss = impact_of_loss(asked, plan_topology(asked, 1, "here"), frozenset({3}))
    assert (loss.broken, loss.whole, loss.waiting, loss.gone) == ((0,), (1,), (0, 1, 2), 0)


def test_zero_1_keeps_parameters_on_every_rank() -> None:
    """A lost rank of dp_shard takes its moments along, and under zero 1 nothing else."""
    for zero, tensors in ((1, 2), (2, 3), (3, 3)):
        asked = config({"workers": 2, "dp_shard": 2}, zero)
        loss = impact_of_loss(asked, plan_topology(asked, 1, "here"), frozenset({1}))
        one = sum(s.nbytes for s in state_table(asked.model) if s.name.startswith("model."))
        assert loss.gone % tensors == 0
        assert 0.4 < loss.gone / tensors / one < 0.5, "11 rows of vocabulary: 6 and 5"


def test_a_rank_that_is_not_there() -> None:
    asked = config({"workers": 4})
    with pytest.raises(LayoutError, match="rank 4 is not in a world of 4; use ranks 0 to 3"):
        impact_of_loss(asked, plan_topology(asked, 1, "here"), frozenset({1, 4}))

"""Who captures a rank's part a second time: compared with a count of every element."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.ownership import owned_boxes
from holdfast.core.sharding.state_table import local_boxes, state_table
from holdfast.layout import Layout, Topology, place
from holdfast.policy.mirrors import mirror_of
from holdfast.policy.placement import Machine
from tests.support.topologies import MODELS, topologies

Element = tuple[str, tuple[int, ...]]


def elements(boxes: tuple[Box, ...]) -> set[Element]:
    return {
        (box.name, at)
        for box in boxes
        for at in product(*(range(a, b) for a, b in zip(box.offsets, box.stops, strict=True)))
    }


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_mirror_holds_all_that_a_rank_owns_and_stands_on_another_node(
    data: st.DataObject,
) -> None:
    model = data.draw(st.sampled_from(MODELS))
    plain = data.draw(topologies(model.layers, 4))
    nodes = tuple(data.draw(st.sampled_from("abc")) for _ in plain.nodes)
    topology = Topology(1, plain.replicas, nodes)
    machines = {"a": Machine("a", rack="1"), "b": Machine("b", rack="1"), "c": Machine("c")}
    table = state_table(model)[::5]
    for rank in range(topology.world_size):
        mirror = mirror_of(topology, machines, rank)
        if mirror is None:
            continue
        assert nodes[rank] != nodes[mirror]
        held = elements(local_boxes(topology, table, mirror))
        assert elements(owned_boxes(topology, table, rank)) <= held


def test_a_mirror_stands_as_far_away_as_it_can_and_the_work_is_shared() -> None:
    def mirrors(topology: Topology, machines: dict[str, Machine]) -> list[int | None]:
        return [mirror_of(topology, machines, rank) for rank in range(topology.world_size)]

    three = place(Layout(dp_replicate=3, dp_shard=2), 1, ("a", "a", "b", "b", "c", "c"))
    racks = {"a": Machine("a", rack="1"), "b": Machine("b", rack="1"), "c": Machine("c")}
    assert mirrors(three, {}) == [2, 3, 4, 5, 0, 1]
    assert mirrors(three, racks) == [4, 5, 4, 5, 0, 1]
    assert mirrors(place(Layout(dp_replicate=2), 1, ("a", "a")), {}) == [None, None]
    assert mirrors(place(Layout(dp_shard=2), 1, ("a", "b")), {}) == [None, None]

"""Which boxes have a second holder far enough away: compared with a count of every element."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.layout import Layout, Topology, place
from holdfast.policy.mirrors import held_apart, mirror_of, without
from holdfast.policy.placement import Machine, shared
from holdfast.spec.boxes import Box
from holdfast.spec.ownership import owned_boxes
from holdfast.spec.state import local_boxes, state_table
from tests.spec.topologies import MODELS, tiny, topologies

Element = tuple[str, tuple[int, ...]]


def elements(boxes: tuple[Box, ...]) -> set[Element]:
    return {
        (box.name, at)
        for box in boxes
        for at in product(*(range(a, b) for a, b in zip(box.offsets, box.stops, strict=True)))
    }


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_held_apart_is_what_a_count_of_elements_says(data: st.DataObject) -> None:
    model = data.draw(st.sampled_from(MODELS))
    plain = data.draw(topologies(model.layers, 4))
    nodes = tuple(data.draw(st.sampled_from("abc")) for _ in plain.nodes)
    topology = Topology(1, plain.replicas, nodes)
    machines = {"a": Machine("a", rack="1"), "b": Machine("b", rack="1"), "c": Machine("c")}
    table = state_table(model)[::5]
    held = [elements(local_boxes(topology, table, r)) for r in range(topology.world_size)]
    right = set()
    for rank, node in enumerate(nodes):
        apart = [r for r, n in enumerate(nodes) if not shared(machines[node], machines[n])]
        there = set().union(*(held[r] for r in apart))
        if elements(owned_boxes(topology, table, rank)) <= there:
            right.add(rank)
    assert held_apart(topology, table, machines) == right


def test_replicas_on_two_nodes_need_no_copy_and_on_one_they_do() -> None:
    table = state_table(tiny())
    apart = place(Layout(dp_replicate=2, dp_shard=2), 1, ("a", "a", "b", "b"))
    together = place(Layout(dp_replicate=2, dp_shard=2), 1, ("a", "b", "a", "b"))
    assert held_apart(apart, table, {}) == {0, 1, 2, 3}
    assert held_apart(together, table, {}) == frozenset()
    rack = {"a": Machine("a", rack="r"), "b": Machine("b", rack="r")}
    assert held_apart(apart, table, rack) == frozenset()


def test_what_is_left_of_a_box() -> None:
    box = Box("w", (2, 0), (6, 5))
    hole = Box("w", (3, 1), (2, 9))
    rest = without(box, hole)
    assert sum(part.size for part in rest) == box.size - 2 * 4
    assert not any(part.intersect(hole) for part in rest)
    assert without(box, Box("w", (0, 0), (2, 5))) == [box]


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

"""Which link a group crosses, against two measured nodes of 8 devices."""

from __future__ import annotations

import pytest

from holdfast.plan.cost.choice import ReplicaChoice
from holdfast.plan.cost.collectives import allreduce_s, tree_s
from holdfast.plan.cost.group_links import exchange_links, group_links, ring_link
from holdfast.plan.hardware.cluster import Cluster, NodePool
from holdfast.plan.hardware.link import Link

GB = 1e9
# Galvatron's allreduce_bandwidth_2nodes_8gpus_per_node.json in GB/s of bus bandwidth: 16 neighbours
# 46.9, 8 strided 21.8, 4 strided 17.0, 2 strided 8.5, and 8 neighbours 163
TWO_NODES = NodePool("a", 2, 8, "A100-80", Link(4.5e-6, 163 * GB), Link(8.7e-6, 46.9 / 8 * GB))


@pytest.mark.parametrize(
    ("ranks", "distance", "measured"),
    [(16, 1, 46.9), (8, 2, 21.8), (4, 4, 17.0), (2, 8, 8.5), (8, 1, 163.2)],
)
def test_a_ring_reaches_the_cards_of_its_own_ranks(
    ranks: int, distance: int, measured: float
) -> None:
    reached = ring_link(TWO_NODES, ranks, distance).bandwidth / GB

    assert reached == pytest.approx(measured, rel=0.35)


def test_a_strided_group_is_7_to_28_times_dearer_than_neighbours() -> None:
    near, size = ring_link(TWO_NODES, 8, 1), 2**30
    for ranks, distance in ((8, 2), (4, 4), (2, 8)):
        times = ring_link(TWO_NODES, ranks, distance).allreduce_s(size, ranks)
        assert 6 < times / near.allreduce_s(size, ranks) < 29


def test_gradients_of_experts_travel_between_their_copies() -> None:
    pool = NodePool("a", 8, 8, "B300", Link(0, 400 * GB), Link(0, 50 * GB))
    group = ReplicaChoice(1, 1, 64, 1, 1, (4,), ("a",), 1)

    links = group_links(Cluster((pool,)), group, 0, 1, ep=8)

    # 8 ranks with the same experts, one in each node, by one card; all 64 by eight cards
    assert links.copies.bandwidth == 50 * GB
    assert links.shards.bandwidth == 400 * GB


def test_a_small_sum_of_many_ranks_goes_by_trees() -> None:
    link = Link(10e-6, 25 * GB)

    assert allreduce_s(link, 2**20, 1024) == tree_s(link, 2**20, 1024)
    assert allreduce_s(link, 2**34, 8) == link.allreduce_s(2**34, 8)
    assert allreduce_s(link, 2**20, 1) == 0


def test_a_ring_across_nodes_is_no_faster_than_the_links_inside() -> None:
    pool = NodePool("a", 2, 8, "H100-80", Link(4e-6, 100 * GB), Link(8e-6, 50 * GB))

    assert ring_link(pool, 16, 1).bandwidth == 100 * GB


def test_an_exchange_sends_a_token_once_to_each_node() -> None:
    pool = NodePool("a", 2, 8, "H100-80", Link(0, 400 * GB), Link(0, 50 * GB))

    # of two nodes an expert's token needs the other one half of the time; of 8 experts almost all
    assert exchange_links(pool, 16, 1).seconds(GB, 1) == pytest.approx(0.5 / 50)
    assert exchange_links(pool, 16, 1).seconds(GB, 8) == pytest.approx((2 - 2**-7) / 2 / 50)
    assert exchange_links(pool, 8, 1).seconds(GB, 1) == pytest.approx(7 / 8 / 400)

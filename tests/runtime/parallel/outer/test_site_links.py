"""Links between sites are measured by one rank of each."""

from __future__ import annotations

from typing import Any

from holdfast.config.sections.cluster import ClusterConfig
from holdfast.parallel.comm.transport import PeerGroup
from holdfast.parallel.outer.site_links import measure_site_links
from tests.support.ranks import RankContext, rank_values

NODES = ("n0", "n0", "n1", "n2")
OPEN = [{"name": f"site-{n}", "nodes": [f"n{n}"]} for n in range(3)]


def _links(rank: RankContext, sites: list[dict[str, Any]]) -> list[list[str]]:
    peers = PeerGroup(rank.store(), "links", rank.rank, rank.world_size, seconds=60)
    cluster = ClusterConfig.model_validate({"sites": sites})
    found = measure_site_links(peers, NODES, cluster)
    assert all(link.mbit_s > 1 and link.latency_ms > 0 for link in found)
    rank.barrier("end")
    return [[link.site, link.other] for link in found]


def test_the_first_rank_of_each_pair_of_sites_measures_their_link() -> None:
    found = rank_values(_links, 4, {"sites": OPEN})
    first = [["site-0", "site-1"], ["site-0", "site-2"]]
    assert found == [first, [], [["site-1", "site-2"]], []]


def test_links_that_the_run_file_gives_are_not_measured() -> None:
    given = [site | {"mbit_s": 100} for site in OPEN]
    assert rank_values(_links, 4, {"sites": given}) == [[]] * 4

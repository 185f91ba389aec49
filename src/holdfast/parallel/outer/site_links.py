"""Measures the links between the sites of a run when a generation starts, and paces what is sent.

A connection that fills a link makes a queue before it. Acknowledgements of what comes the other way
wait in this queue, so the other direction starts slowly. In rounds over 10 Mbit/s, one direction
had a quarter of the link until the other one was done. So no connection sends faster than the link
that the run file gives.

The first ranks of two sites send each other small messages, then larger ones in both directions at
the same time. The pairs take turns. Each rank knows the sites of all nodes, so all agree on the
turns.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from holdfast.config.sections.cluster import ClusterConfig
from holdfast.events import SiteLinkMeasured
from holdfast.parallel.comm.abortable_wait import AbortableWait
from holdfast.parallel.comm.transport import PeerGroup
from holdfast.parallel.outer.payloads import lost_while_exchanged
from holdfast.parallel.torch_compat import Work

_PINGS = 5
_CHUNKS = 10
"""Messages of a pass, of which the first two open the window of the connection."""
_CHUNK_BYTES = (1 << 15, 1 << 18)
"""Of a message in the first pass, and in a second one if the first was quick."""
_QUICK_S = 0.1
_FIRST_TAG = 1 << 13
_HEADERS = 1.03
"""Bytes on a link over those of a file: `mbit_s` is what a copy of a file reaches."""


def pace_site_links(peers: PeerGroup, nodes: Sequence[str], cluster: ClusterConfig) -> None:
    """Send to ranks of other sites no faster than the slower of the two links that the run file
    gives. nodes: of all peers."""
    sites = [cluster.site_of(node) for node in nodes]
    own = sites[peers.rank]
    if own is None or own.mbit_s is None:
        return
    peers.pace(
        {
            position: _HEADERS * min(own.mbit_s, site.mbit_s) * 1e6 / 8
            for position, site in enumerate(sites)
            if site is not None and site is not own and site.mbit_s is not None
        }
    )


def measure_site_links(
    peers: PeerGroup, nodes: Sequence[str], cluster: ClusterConfig
) -> list[SiteLinkMeasured]:
    """Return the links that this rank has measured: none if the run file gives all of them. Call
    it on all ranks, between two steps. nodes: of all peers. Raises PeerLostError."""
    if all(site.mbit_s is not None for site in cluster.sites):
        return []
    leaders: dict[str, int] = {}  # by site: a peer
    for position, node in enumerate(nodes):
        site = cluster.site_of(node)
        if site is not None:
            leaders.setdefault(site.name, position)
    own, found = peers.rank, []
    for (name, one), (other, two) in combinations(sorted(leaders.items()), 2):
        if own in (one, two):
            rate, latency_s = _measure(peers, two if own == one else one, own == one)
            if own == one:
                mbit_s, latency_ms = rate * 8 / 1e6, latency_s * 1000
                found.append(SiteLinkMeasured(name, other, mbit_s, latency_ms))
    return found


def _measure(peers: PeerGroup, peer: int, begins: bool) -> tuple[float, float]:
    """Return the bytes a second of the slower direction, and the seconds of one way."""
    found: list[float] = []

    def exchange(errand: AbortableWait) -> None:
        latency_s = _ping(peers, peer, begins, errand)
        for turn, size in enumerate(_CHUNK_BYTES):
            rate = _rate(peers, peer, turn, size, errand)
            found[:] = [rate, latency_s]
            if _CHUNKS * size / rate > _QUICK_S:
                break

    wait = AbortableWait(exchange, "links of sites")
    peers.start_wait(wait)
    try:
        peers.join_wait(wait)
    except RuntimeError as error:
        raise lost_while_exchanged(error) from error
    return found[0], found[1]


def _ping(peers: PeerGroup, peer: int, begins: bool, errand: AbortableWait) -> float:
    """Return half of the quickest round trip."""
    works = _expect(peers, peer, _FIRST_TAG, torch.empty((_PINGS, 1), dtype=torch.uint8))
    quickest = float("inf")
    for number, work in enumerate(works):
        message = torch.zeros(1, dtype=torch.uint8)
        start = time.perf_counter()
        if begins:
            peers.send(message, peer, _FIRST_TAG + number)
        errand.wait(work)
        if begins:
            quickest = min(quickest, time.perf_counter() - start)
        else:
            peers.send(message, peer, _FIRST_TAG + number)
    return quickest / 2


def _rate(peers: PeerGroup, peer: int, turn: int, size: int, errand: AbortableWait) -> float:
    """Return the bytes a second of the slower direction. Both ranks return the same."""
    first_tag = _FIRST_TAG + _PINGS + turn * (_CHUNKS + 1)
    arrivals = torch.empty((_CHUNKS, size), dtype=torch.uint8)
    works = _expect(peers, peer, first_tag, arrivals)
    theirs = torch.empty(1, dtype=torch.float64)
    answer = peers.receive(theirs, peer, first_tag + _CHUNKS)
    for number in range(_CHUNKS):
        peers.send(torch.zeros(size, dtype=torch.uint8), peer, first_tag + number)
    times = []
    for work in works:
        errand.wait(work)
        times.append(time.perf_counter())
    own = (_CHUNKS - 2) * size / max(1e-6, times[-1] - times[1])
    peers.send(torch.tensor([own], dtype=torch.float64), peer, first_tag + _CHUNKS)
    errand.wait(answer)
    return min(own, float(theirs))


def _expect(peers: PeerGroup, peer: int, first_tag: int, into: Tensor) -> Sequence[Work]:
    """Return a receive for each row of a tensor."""
    return [peers.receive(row, peer, first_tag + number) for number, row in enumerate(into)]

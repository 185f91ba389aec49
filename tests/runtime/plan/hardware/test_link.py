"""Links: what a size of message reaches follows from latency and bandwidth, as it was measured."""

from __future__ import annotations

from holdfast.plan.hardware.link import Link, load_links

LINKS = load_links()
MIB = 2**20
SIMAI_PEAK = 200e9
"""Of a node's network in SimAI's ratios: eight ports of 200 Gbit/s, in bytes a second."""

# SimAI (NSDI'25), measured share of the peak bus bandwidth: (nodes of eight, MiB): share.
NETWORK = {
    (2, 16): 0.32,
    (2, 1024): 0.92,
    (8, 16): 0.13,
    (8, 256): 0.69,
    (8, 1024): 0.90,
    (32, 64): 0.106,
    (32, 1024): 0.74,
    (128, 16): 0.0087,
    (128, 256): 0.1027,
    (128, 1024): 0.3146,
}
ONE_NODE = {16: 0.45, 32: 0.55, 64: 0.65, 128: 0.69, 256: 0.73, 1024: 0.77, 16384: 0.81}


def test_small_messages_over_many_nodes_reach_what_was_measured() -> None:
    """No table: the ring's steps and one latency give 0.0087 of the peak on 128 nodes."""
    hdr = LINKS["ib-hdr"].link
    node = Link(hdr.latency_s, 8 * hdr.bandwidth)  # the ring of a node uses all its ports
    errors = [
        abs(node.reached(mib * MIB, 8 * nodes, SIMAI_PEAK) / share - 1)
        for (nodes, mib), share in NETWORK.items()
    ]
    assert max(errors) < 0.3
    assert sum(errors) / len(errors) < 0.12


def test_one_node_reaches_what_was_measured() -> None:
    nvlink = LINKS["nvlink3"]
    for mib, share in ONE_NODE.items():
        assert abs(nvlink.link.reached(mib * MIB, 8, nvlink.peak) / share - 1) < 0.05, mib


def test_messages_collectives_and_shares() -> None:
    link = Link(1e-3, 1e6)
    assert link.message_s(1000) == 2e-3
    assert link.allreduce_s(4000, 4) == 6 * 2e-3
    assert link.allreduce_s(4000, 1) == 0
    assert link.shared_by(4).message_s(1000) == 5e-3
    with_ramp = Link(1e-3, 1e6, ramp=2.0)
    assert with_ramp.message_s(1000) == 4e-3  # (sqrt(1 ms) + sqrt(1 ms))^2
    assert with_ramp.message_s(1e9) < 1.01 * link.message_s(1e9)
    assert with_ramp.shared_by(2).ramp == 2.0

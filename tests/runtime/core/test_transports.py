"""What a backend's log says of its connections, in the words of NCCL 2.28 to 2.30."""

from __future__ import annotations

import pytest

from holdfast.core.transports import (
    CardLink,
    NetworkPort,
    NodeLinks,
    find_channels,
    find_slow_transport,
    name_transports,
)

NVLINK = """\
gpu01:324:801 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
gpu01:324:801 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read
"""
DIRECT = "gpu01:3:8 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/direct pointer\n"
SHARED_2_28 = "gpu01:3:8 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct\n"
SHARED_2_30 = "gpu01:3:8 [0] NCCL INFO Channel 00 : 1[1] -> 0[0] via SHM/direct\n"
BUS_ADDRESSES = "n:1:1 [0] NCCL INFO Channel 00 : 0[1b000] -> 1[1c000] via SHM/direct/direct\n"
INFINIBAND = """\
gpu01:9:9 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.2<0>
gpu01:9:9 [0] NCCL INFO Initialized NET plugin IB
gpu01:9:9 [0] NCCL INFO Using network IB
gpu01:9:9 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
gpu01:9:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0(1)/GDRDMA/Shared
"""
LIBFABRIC = "ip:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/Libfabric/0/GDRDMA\n"
TCP = """\
gpu01:9:9 [0] NCCL INFO NET/IB : No device found.
gpu01:9:9 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.2<0>
gpu01:9:9 [0] NCCL INFO Using network Socket
gpu01:9:9 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
gpu01:9:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
"""
NO_DEVICE = "NET/IB : No device found."

JOINED = NodeLinks((CardLink(0, 1, "NVLink NV18"),))
WIRED = NodeLinks(ports=(NetworkPort("mlx5_0", "InfiniBand", "400 Gb/sec"),))
ON_EFA = NodeLinks(ports=(NetworkPort("rdmap79s0", "Unspecified", "100 Gb/sec"),))


@pytest.mark.parametrize(
    ("log", "links", "names"),
    [
        ("", JOINED, ""),
        (NVLINK, JOINED, "NVLink"),
        (NVLINK, NodeLinks((CardLink(0, 1, "xGMI"),)), "xGMI"),
        (NVLINK, NodeLinks(), "PCIe"),
        (DIRECT, JOINED, "NVLink"),
        (SHARED_2_28, NodeLinks(), "shared memory"),
        (SHARED_2_30 + TCP, NodeLinks(), "TCP and shared memory"),
        (NVLINK + INFINIBAND, JOINED, "InfiniBand and NVLink"),
        (LIBFABRIC, NodeLinks(), "Libfabric"),
    ],
)
def test_the_names_of_what_carries_the_data(log: str, links: NodeLinks, names: str) -> None:
    assert name_transports(find_channels(log), links) == names


@pytest.mark.parametrize(
    ("log", "links", "has_other_nodes"),
    [
        (NVLINK, JOINED, False),
        (SHARED_2_28, NodeLinks(), False),  # the cards have no link
        (SHARED_2_28, NodeLinks((CardLink(2, 3, "NVLink NV4"),)), False),  # nor these two
        (BUS_ADDRESSES, JOINED, False),  # which cards these are is not known
        (INFINIBAND + NVLINK, NodeLinks(JOINED.cards, WIRED.ports), True),
        (LIBFABRIC, ON_EFA, True),
        (TCP, NodeLinks(), True),  # TCP is all that there is
        (TCP, JOINED, True),  # between nodes, where NVLink does not reach
        (TCP, WIRED, False),  # one node needs no InfiniBand
    ],
)
def test_what_is_as_fast_as_it_can_be(log: str, links: NodeLinks, has_other_nodes: bool) -> None:
    assert find_slow_transport(log, links, {}, has_other_nodes=has_other_nodes) is None


@pytest.mark.parametrize(
    ("log", "links", "environment", "words", "advice"),
    [
        (SHARED_2_28, JOINED, {"NCCL_P2P_DISABLE": "1"}, "NVLink NV18 joins them", "P2P_DISABLE=1"),
        (SHARED_2_30, JOINED, {"NCCL_P2P_LEVEL": "NVL"}, "cards 0 and 1", "in the worker's log"),
        (
            "P2P is disabled between NVLINK connected GPUs 0 and 1." + SHARED_2_30,
            *(JOINED, {}, "shared memory", "look at the cards"),
        ),
        (TCP.replace(NO_DEVICE, ""), JOINED, {}, "over TCP, though NVLink NV18", "worker's log"),
        (TCP, WIRED, {}, "mlx5_0 (InfiniBand, 400 Gb/sec) is active", "/dev/infiniband"),
        (TCP, WIRED, {"NCCL_IB_HCA": "mlx5_7"}, "over TCP", "unset NCCL_IB_HCA=mlx5_7"),
        (TCP, WIRED, {"NCCL_NET": "Socket"}, "over TCP", "unset NCCL_NET=Socket"),
        (
            "n [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.\n" + TCP,
            *(WIRED, {}, "between nodes", "unset NCCL_IB_DISABLE=1"),
        ),
        (
            "n [0] NCCL INFO Failed to open libibverbs.so[.1]\n" + TCP,
            *(WIRED, {}, "between nodes", "install libibverbs"),
        ),
        (TCP, ON_EFA, {}, "rdmap79s0", "install the plugin aws-ofi-nccl"),
    ],
)
def test_what_is_slow_without_need(
    log: str, links: NodeLinks, environment: dict[str, str], words: str, advice: str
) -> None:
    others = links is not JOINED
    slow = find_slow_transport(log, links, environment, has_other_nodes=others)
    assert slow is not None
    assert words in slow.sentence
    assert advice in slow.advice

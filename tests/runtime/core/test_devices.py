"""The device table: what the rest of the code asks instead of a device's name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

import holdfast
from holdfast.config.run import RunConfig
from holdfast.core.device_progress import GroupProgress, find_late_devices
from holdfast.core.devices import DEVICES, device_kind, is_accelerator
from holdfast.core.transports import (
    CardLink,
    NetworkPort,
    NodeLinks,
    find_channels,
    find_slow_transport,
    name_transports,
)

SOURCES = Path(holdfast.__file__).parent
TABLE_FILES = {"core/devices.py", "config/run.py", "machine/accelerators.py", "machine/hardware.py"}
HERE = {
    "launch/node/devices.py": "what torch was built for",
    "config/loading/explain.py": "what a person may have meant by another word",
    "doctor/checks.py": "names of packages, whose versions are compared",
    "machine/installed_versions.py": "the same",
    "launch/owners/kubernetes/pod.py": "which cards a pod asks Kubernetes for",
}


def test_the_run_file_offers_the_kinds_of_the_table() -> None:
    kind = RunConfig.model_fields["device"].annotation
    offered = set(get_args(kind))
    assert offered == {"auto", *DEVICES}


def test_no_other_file_asks_for_an_accelerator_by_name() -> None:
    name = re.compile(r"""["'](cuda|nccl|xpu|xccl|mps)["']""")
    found = {
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.py")
        if name.search(path.read_text("utf-8"))
    }
    assert found - TABLE_FILES - set(HERE) <= {
        "config/sections/cluster.py",  # values of cluster.backend
        "parallel/comm/devices.py",
        "parallel/torch_compat.py",
    }


def test_a_device_is_named_with_its_index_where_a_process_chooses_one() -> None:
    assert [DEVICES[name].device(2) for name in ("cpu", "cuda", "xpu", "mps")] == [
        *("cpu", "cuda:2", "xpu:2", "mps")
    ]
    assert device_kind("cuda:1") is device_kind("cuda") is DEVICES["cuda"]
    assert [is_accelerator(name) for name in ("auto", "cpu", "cuda")] == [False, False, True]


@pytest.mark.parametrize("name", ["tpu", "xla"])
def test_a_tpu_is_refused_with_one_sentence(name: str) -> None:
    with pytest.raises(ValueError, match="does not train on TPUs"):
        RunConfig.model_validate({"device": name})


def test_no_setting_lets_the_backend_end_a_process() -> None:
    settings = DEVICES["cuda"].settings
    for variable in (
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "TORCH_NCCL_ENABLE_MONITORING",
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS",
        "NCCL_NVLS_ENABLE",
    ):
        assert settings[variable] == "0"
    assert not DEVICES["cpu"].settings


# --- the device that the rest waits for, by counts of exchanges -----------------------------------
def at(group: str, reached: int, done: int) -> GroupProgress:
    return GroupProgress(group, 9, reached, done)


def test_a_device_that_waits_in_another_exchange_is_not_late() -> None:
    """Rank 2 waits for rank 1 in a group of two, so it does not come to that of all."""
    found = find_late_devices(
        {
            0: [at("all", 4, 3)],
            1: [at("all", 3, 3), at("two", 5, 5)],
            2: [at("all", 3, 3), at("two", 6, 5)],
        }
    )
    assert found == {1: at("all", 3, 3)}


def test_nothing_is_known_of_ranks_that_tell_nothing_or_the_same() -> None:
    assert find_late_devices({}) == find_late_devices({0: [], 1: []}) == {}
    assert find_late_devices({0: [at("all", 4, 3)], 1: [at("all", 4, 3)]}) == {}
    assert find_late_devices({0: [at("one", 4, 3)], 1: [at("other", 2, 2)]}) == {}


def test_counts_travel_as_rows() -> None:
    rows = [at("all", 4, 3).to_json()]
    assert tuple(map(GroupProgress.from_json, rows)) == (at("all", 4, 3),)


# --- what a backend's log says of its connections, in the words of NCCL 2.28 to 2.30 --------------
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

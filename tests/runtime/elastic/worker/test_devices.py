"""A worker and its device: the transport of its data, a device that fails, and memory that groups
leave behind."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from holdfast.config.sections.layout import LayoutConfig
from holdfast.core.devices import DEVICES
from holdfast.core.transports import NodeLinks
from holdfast.elastic.protocol import exit_codes
from holdfast.elastic.worker.device_wear import DeviceWear
from holdfast.elastic.worker.generation_loop import run_generations
from holdfast.elastic.worker.worker_setup import TransportWatch
from holdfast.errors import DeviceStuckError, LayoutError
from holdfast.layout import Layout, place_layout
from holdfast.machine import links
from holdfast.parallel.comm import devices
from holdfast.parallel.comm.device_group import DeviceGroup
from tests.runtime.plan.test_links import write
from tests.support import fake_nccl
from tests.support.ranks import RankContext, ranks

TWO_NODES = place_layout(Layout(dp_replicate=2), 1, ("one", "two"))


@ranks(2)
def test_tcp_is_refused_where_a_port_is_active_and_accepted_by_the_run_file(
    rank: RankContext,
) -> None:
    system = Path(rank.folder) / f"sys{rank.rank}"
    port = system / "class/infiniband/mlx5_0/ports/1"
    write(port, state="4: ACTIVE\n", link_layer="InfiniBand\n")
    links.SYSTEM = system
    fake_nccl.install("NET/Socket/0")
    watch = TransportWatch(fake_nccl.KIND)
    assert watch.names == ""
    for number, refused in enumerate((True, False)):
        cpu = torch.device("cpu")
        group = DeviceGroup(
            fake_nccl.NAME, rank.store(str(number)), str(number), rank.rank, 2, cpu, seconds=60.0
        )
        group.open(lambda: False)
        layout = LayoutConfig(allow_tcp=not refused)
        if refused:
            with pytest.raises(LayoutError, match=r"over TCP, though mlx5_0 \(InfiniBand\)") as why:
                watch.refuse_slow(TWO_NODES, layout)
            assert "layout.allow_tcp=true" in str(why.value)
        else:
            watch.refuse_slow(TWO_NODES, layout)
        assert watch.names == "TCP"
        watch.refuse_slow(TWO_NODES, LayoutConfig())  # a generation that made no group
        group.close()


def test_a_cpu_has_no_log_to_read() -> None:
    watch = TransportWatch(DEVICES["cpu"])
    assert watch.find_slow(TWO_NODES) is None
    assert (watch.names, watch._links) == ("", NodeLinks())


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        DeviceStuckError("cuda:0 still works on a group that was given up 10 s ago"),
    ],
)
def test_a_failed_device_ends_the_process(error: Exception) -> None:
    def train() -> None:
        raise error

    worker = SimpleNamespace(begin_generation=lambda: None, train=train, generation=1)
    commands = SimpleNamespace(start=lambda: None, is_halted=lambda generation: True)
    spec = SimpleNamespace(rank=0)
    code = run_generations(cast(Any, worker), cast(Any, spec), cast(Any, commands))
    assert code == exit_codes.PEER_LOST


GIB = 2**30
CARD = torch.device("cuda:0")


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes of a card of 80 GiB: all that is used, and what torch has of it."""
    found = {"all": 10 * GIB, "torch": 9 * GIB}
    module = SimpleNamespace(
        mem_get_info=lambda device: (80 * GIB - found["all"], 80 * GIB),
        memory_reserved=lambda device: found["torch"],
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return found


def test_growth_next_to_the_tensors_wears_a_process(used: dict[str, int]) -> None:
    wear = DeviceWear(DEVICES["cuda"])
    wear.read_memory(CARD)
    used.update({"all": 40 * GIB, "torch": 38 * GIB})  # the model has grown, and a group's 1 GiB
    wear.read_memory(CARD)
    assert devices.memory_outside_torch(CARD) == 2 * GIB
    assert not wear.is_worn(0)
    used["all"] = int(43.5 * GIB)
    wear.read_memory(CARD)
    assert wear.is_worn(0)
    assert not wear.is_worn(1), "the ranks are not replaced at once"


def test_so_does_a_number_of_generations(used: dict[str, int]) -> None:
    wear = DeviceWear(DEVICES["cuda"])
    wear.regroups = 32
    assert wear.is_worn(0)
    assert not wear.is_worn(1)
    wear.regroups = 36
    assert wear.is_worn(1)
    shared = DeviceWear(DEVICES["cuda"].staged(2))  # gloo leaves nothing on a device
    shared.regroups = 36
    assert not shared.is_worn(0)


def test_a_cpus_memory_is_not_read() -> None:
    DeviceWear(DEVICES["cpu"]).read_memory(torch.device("cpu"))

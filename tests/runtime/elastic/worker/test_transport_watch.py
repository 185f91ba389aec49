"""A worker learns from its backend's log what carries its data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast.config.sections.layout import LayoutConfig
from holdfast.core.devices import DEVICES
from holdfast.core.transports import NodeLinks
from holdfast.elastic.worker.worker_setup import TransportWatch
from holdfast.errors import LayoutError
from holdfast.layout import Layout, place_layout
from holdfast.machine import links
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
